//! `config` and `completions`: the command itself.

use crate::{
    cli::Cli,
    ctl::Ctl,
    error::CtlError,
    output::{Section, Table, Tone, print},
};
use clap::{ArgMatches, CommandFactory, parser::ValueSource};
use larder_daemon::config::HumanDuration;
use larder_proto::control;
use serde::Serialize;

#[derive(Debug, Serialize)]
struct Settings {
    settings: Vec<Setting>,
    masters: Vec<Master>,
}

#[derive(Debug, Serialize)]
struct Setting {
    name: &'static str,
    value: String,
    from: String,
}

#[derive(Debug, Serialize)]
struct Master {
    address: String,
    reachable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// `larderctl config`. Masters that are down are shown as such; they are no failure of the settings.
pub(crate) async fn config(ctl: &Ctl, matches: &ArgMatches) -> Result<(), CtlError> {
    let addresses: Vec<&str> = ctl.masters().addresses().collect();
    let timeout = matches.get_one::<HumanDuration>("timeout").map(ToString::to_string);
    let values = [
        ("masters", addresses.join(",")),
        ("tenant", ctl.tenant().to_string()),
        ("timeout", timeout.unwrap_or_default()),
    ];
    let setting = |(name, value)| Setting { name, value, from: origin(matches, name) };
    let asked = ctl
        .masters()
        .ask_each(|mut master| async move { master.status(control::StatusRequest {}).await });
    let masters = asked.await.into_iter().map(|(address, answer)| Master {
        address,
        reachable: answer.is_ok(),
        error: answer.err(),
    });
    let settings = Settings { masters: masters.collect(), settings: values.map(setting).into() };
    ctl.out.show(&settings, for_people)
}

/// Where the value of a global option comes from.
fn origin(matches: &ArgMatches, name: &str) -> String {
    match matches.value_source(name) {
        Some(ValueSource::CommandLine) => format!("--{name}"),
        Some(ValueSource::EnvVariable) => format!("LARDER_{}", name.to_uppercase()),
        _ => "default".to_owned(),
    }
}

fn for_people(settings: &Settings) -> Vec<Section> {
    let mut table = Table::new(&["setting", "value", "from"], "no settings");
    for Setting { name, value, from } in &settings.settings {
        table.row(Tone::Plain, [(*name).to_owned(), value.clone(), from.clone()]);
    }
    let mut masters = Table::new(&["master", "state"], "no master is configured");
    for Master { address, error, .. } in &settings.masters {
        let (tone, state) = match error {
            None => (Tone::Good, "answers".to_owned()),
            Some(error) => (Tone::Bad, format!("unreachable: {error}")),
        };
        masters.row(tone, [address.clone(), state]);
    }
    vec![Section::Table(table), Section::Table(masters)]
}

/// `larderctl completions`.
pub(crate) fn completions(shell: clap_complete::Shell) -> Result<(), CtlError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "larderctl", &mut script);
    print(&script)
}
