//! Compiles `control/larder.proto` with protox, so that no protoc is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=control");
    #[cfg(feature = "control")]
    {
        let files = protox::compile(["control/larder.proto"], ["control"])?;
        tonic_prost_build::configure().bytes(".").compile_fds(files)?;
    }
    Ok(())
}
