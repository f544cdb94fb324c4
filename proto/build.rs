//! Compiles the protos with protox, so that no protoc is needed, and keeps the descriptor set for reflection.

use std::path::PathBuf;

use prost::Message;

const PROTOS: &[&str] = &["thalweg/v1/worker.proto", "thalweg/v1/inference.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(PROTOS, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
