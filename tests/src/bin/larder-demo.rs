//! `larder-demo MODEL.gguf REPORT.json`: see `larder_tests::demo`.
#![forbid(unsafe_code)]

use std::{path::Path, process::ExitCode};

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, report] = arguments.as_slice() else {
        eprintln!("usage: larder-demo MODEL.gguf REPORT.json (make demo does all the set-up)");
        return ExitCode::from(2);
    };
    match larder_tests::demo::run(Path::new(model), Path::new(report)).await {
        Ok(steps) if steps.iter().all(|step| step.output_equal) => ExitCode::SUCCESS,
        Ok(_) => {
            eprintln!("demo: an output differs from the recomputed one");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("demo: {error}");
            ExitCode::FAILURE
        }
    }
}
