//! `larder-bench`: one bench for one question, as ratios against a named reference in the same run.
//!
//! Contract: a bench starts what it needs as child processes on loopback, stops them by pid, shows progress on
//! standard error, prints one table on standard output, and writes the same rows as JSON where asked. No figure
//! is printed of bytes or answers that were wrong. Exit codes: 0 measured, 1 not measured, 2 usage. A figure
//! that misses its goal is no failure: the table says so.
//!
//! `unsafe` is confined to the counting allocator and to memory that the reference shares with its clients.
#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "an allocator is unsafe to implement; it passes every call on")]
mod allocator;
mod budget;
mod child;
mod content;
mod error;
mod figures;
mod index;
mod notices;
mod replay;
mod report;
mod restart;
mod ssd;
mod transfer;

use clap::{Parser, Subcommand};
use error::BenchError;
use std::{error::Error as _, ffi::OsString, path::PathBuf, process::ExitCode};
use tokio::{
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
};

/// Measures Larder: one bench for one question, beside a reference in the same run
#[derive(Debug, Parser)]
#[command(version, after_help = HELP, term_width = 0)] // The texts are wrapped as they stand.
struct Cli {
    #[command(subcommand)]
    question: Question,
}

const HELP: &str = "\
Figures are ratios within interleaved pairs, because machines are shared and noisy: look at the ratios first,
then at CPU seconds, then at p50. Run one bench at a time. Each command has a --help of its own.
Exit codes: 0 measured, 1 not measured (something failed or bytes were wrong), 2 usage.";

#[derive(Debug, Subcommand)]
enum Question {
    /// What does moving a part cost, beside the least that a verified service could do?
    Transfer(transfer::Args),
    /// How many keys does a master look up, at which cost in memory and CPU?
    Index(index::Args),
    /// How soon does the index know what a node evicted, and is it right in the end?
    Notices(notices::Args),
    /// How much of the prompts of a request trace does each eviction policy find again?
    Replay(replay::Args),
    /// How much of the disk does the ssd tier reach, beside fio?
    Ssd(ssd::Args),
    /// How fast is a node warm again after kill -9, and how much of what it had is served?
    Restart(restart::Args),
    /// The serving end of the reference
    #[command(hide = true)]
    Reference(transfer::reference::server::Args),
    /// Runs a program that ends with this one
    #[command(hide = true, name = child::TIED)]
    Tied {
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().question {
        Question::Transfer(args) => on_runtime(transfer::run(&args)),
        Question::Index(args) => on_runtime(index::run(&args)),
        Question::Notices(args) => on_runtime(notices::run(&args)),
        Question::Replay(args) => replay::run(&args),
        Question::Ssd(args) => on_runtime(ssd::run(&args)),
        Question::Restart(args) => on_runtime(restart::run(&args)),
        Question::Reference(args) => transfer::reference::server::run(&args),
        Question::Tied { program, args } => Err(child::run_tied(&program, &args)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut chain = error.to_string();
            let mut cause = error.source();
            while let Some(error) = cause {
                chain = format!("{chain}: {error}");
                cause = error.source();
            }
            eprintln!("larder-bench: {chain}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a bench until it ends or someone interrupts it; its children end either way.
fn on_runtime(bench: impl Future<Output = Result<(), BenchError>>) -> Result<(), BenchError> {
    let runtime = Runtime::new().map_err(BenchError::io("start the runtime"))?;
    runtime.block_on(async {
        let listen = |kind| signal(kind).map_err(BenchError::io("listen for signals"));
        let mut interrupt = listen(SignalKind::interrupt())?;
        let mut terminate = listen(SignalKind::terminate())?;
        tokio::select! {
            done = bench => done,
            _ = interrupt.recv() => Err(BenchError::Interrupted),
            _ = terminate.recv() => Err(BenchError::Interrupted),
        }
    })
}
