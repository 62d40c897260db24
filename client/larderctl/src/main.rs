//! `larderctl`: looks into a Larder cluster and changes what it holds.
//!
//! A thin layer over `larder-client`: each module is a group of commands that turns answers of masters and
//! nodes into one value, shown as a table or as JSON ([`output`]). The exit code says how it went
//! ([`error`]); an error is printed once, with its causes.
#![forbid(unsafe_code)]

mod blocks;
mod cli;
mod ctl;
mod error;
mod evict;
mod explain;
mod files;
mod lookup;
mod models;
mod node;
mod output;
mod settings;
mod stats;
mod status;
mod top;

use clap::{ArgMatches, CommandFactory, FromArgMatches};
use cli::{Cli, Command, Format};
use ctl::Ctl;
use error::{CtlError, EXIT_OK};
use larder_daemon::run::chain;
use output::Output;
use std::process::ExitCode;

fn main() -> ExitCode {
    let matches = Cli::command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match run(cli, &matches) {
        Ok(()) => ExitCode::from(EXIT_OK),
        Err(error) => {
            eprintln!("larderctl: {}", chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(cli: Cli, matches: &ArgMatches) -> Result<(), CtlError> {
    let format = cli.command.format().or(cli.output.output).unwrap_or(Format::Table);
    let out = Output::new(format);
    let command = match cli.command {
        Command::Completions { shell } => return settings::completions(shell),
        command => command,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| CtlError::Terminal { what: "start the runtime", source })?;
    runtime.block_on(async {
        let ctl = Ctl::new(&cli.global, out)?;
        obey(&ctl, command, matches).await
    })
}

async fn obey(ctl: &Ctl, command: Command, matches: &ArgMatches) -> Result<(), CtlError> {
    match command {
        Command::Status { .. } => status::status(ctl).await,
        Command::Nodes { node, .. } => status::nodes(ctl, node.as_deref()).await,
        Command::Models { name, .. } => models::models(ctl, name).await,
        Command::Stats { node, .. } => stats::stats(ctl, node.as_deref()).await,
        Command::Lookup { blocks, .. } => lookup::lookup(ctl, &blocks).await,
        Command::Explain { blocks, .. } => explain::explain(ctl, &blocks).await,
        Command::Evict(args) => evict::evict(ctl, &args).await,
        Command::Node(args) => node::node(ctl, &args.command).await,
        Command::Top(args) => top::top(ctl, &args).await,
        Command::Pins { node, .. } => stats::pins(ctl, node.as_deref()).await,
        Command::Config { .. } => settings::config(ctl, matches).await,
        Command::Put { file, name, node, .. } => {
            files::put(ctl, &file, &name, node.as_deref()).await
        }
        Command::Get { name, to, .. } => files::get(ctl, &name, &to).await,
        Command::Completions { shell } => settings::completions(shell),
    }
}
