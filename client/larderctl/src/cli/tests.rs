use super::*;
use clap::CommandFactory;

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn every_command_teaches_by_examples_and_exit_codes_are_stated() {
    let mut top = Cli::command();
    assert!(top.render_help().to_string().contains("4  unreachable"));
    let ours = top.get_subcommands_mut().filter(|command| command.get_name() != "help");
    for command in ours {
        let help = command.render_long_help().to_string();
        assert!(help.contains("Examples:\n  larderctl"), "{}", command.get_name());
    }
}

#[test]
fn what_takes_tokens_says_how_to_get_them_and_that_they_need_a_model() {
    let mut top = Cli::command();
    for name in ["lookup", "explain", "evict"] {
        let command = top.find_subcommand_mut(name).unwrap();
        let help = command.render_long_help().to_string();
        assert!(help.contains("localhost:8000/tokenize"), "{help}");
        assert!(help.contains("> prompt.json"), "{help}");
    }
    for name in ["lookup", "explain"] {
        let usage = top.find_subcommand_mut(name).unwrap().render_usage().to_string();
        assert!(usage.contains("--model <NAME> --tokens <FILE>\n"), "{usage}");
    }
}

#[test]
fn the_format_may_stand_before_or_behind_the_command() {
    let before = Cli::try_parse_from(["larderctl", "-o", "json", "nodes"]).unwrap();
    assert_eq!((before.output.output, before.command.format()), (Some(Format::Json), None));
    let behind = Cli::try_parse_from(["larderctl", "nodes", "-o", "json"]).unwrap();
    assert_eq!(behind.command.format(), Some(Format::Json));
}

#[test]
fn a_command_without_its_condition_is_refused() {
    for line in [
        "evict",
        "explain",
        "explain --model llama",
        "explain --tokens file",
        "lookup --key 12",
        "evict --all --model llama",
        "status --timeout 5",
        "nodes --tenant ../etc",
    ] {
        let args = std::iter::once("larderctl").chain(line.split(' '));
        assert!(Cli::try_parse_from(args).is_err(), "{line}");
    }
}
