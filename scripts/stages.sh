# Sourced by the scripts that have several steps: names each, times it, stops at the first that
# fails, and, where there were several, prints a table of the times at the end, whatever the outcome.

stage_names=()
stage_seconds=()
stage_outcomes=()

# stage NAME COMMAND...
stage() {
    local name=$1 began=$SECONDS status=0
    shift
    printf '\n==> %s: %s\n' "$name" "$*" >&2
    "$@" || status=$?
    stage_names+=("$name")
    stage_seconds+=($((SECONDS - began)))
    if [ "$status" -eq 0 ]; then
        stage_outcomes+=(ok)
        return
    fi
    stage_outcomes+=("failed, exit code $status")
    printf '\n==> %s failed with exit code %s: %s\n' "$name" "$status" "$*" >&2
    exit "$status"
}

print_stages() {
    [ "${#stage_names[@]}" -gt 1 ] || return 0
    printf '\n%-12s %9s  %s\n' stage time outcome
    local i
    for i in "${!stage_names[@]}"; do
        printf '%-12s %3d m %2d s  %s\n' "${stage_names[i]}" \
            $((stage_seconds[i] / 60)) $((stage_seconds[i] % 60)) "${stage_outcomes[i]}"
    done
    printf '%-12s %3d m %2d s\n' total $((SECONDS / 60)) $((SECONDS % 60))
}
trap print_stages EXIT
