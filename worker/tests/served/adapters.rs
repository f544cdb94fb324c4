//! A worker with LoRA adapters over real gRPC: what it tells, whom it serves, and what it refuses to load.

use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use thalweg_worker::config::WorkerConfig;
use thalweg_worker::worker::{SharedModel, StartError};

use crate::fixture::{Fixture, generate, request, serve_alone};
use crate::support::tiny_model;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    config: WorkerConfig,
}

/// The tiny Llama; `@name` in the flags is the folder of its adapter.
fn load(flags: &str) -> Result<Arc<SharedModel>, StartError> {
    let folder = tiny_model("llama3");
    let adapters = folder.join("adapters").display().to_string();
    let flags = flags.replace('@', &format!("{adapters}/"));
    let common = "test --device cpu --model m --served-model-name tiny --kv-cache-memory-bytes 8MiB";
    let flags = [common, &flags].into_iter().flat_map(str::split_whitespace);
    SharedModel::load(&folder, &Flags::try_parse_from(flags).expect("known flags").config, 1)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_name_their_adapter() {
    let model = load("--enable-lora --lora-modules one=@all two=@few").expect("sound adapters");
    let Fixture { worker, mut client } = serve_alone(&model).await;
    let about = client.describe(v1::DescribeRequest {}).await.unwrap().into_inner();
    assert_eq!(about.adapters, ["one", "two"]);
    let prints = &about.adapter_fingerprints;
    assert!(prints.len() == 2 && prints[0].len() == 32 && prints[0] != prints[1], "{prints:?}");
    let prompt: Vec<u32> = (0..40).map(|i| i * 7 % 256).collect();
    let asked = |adapter: &str| v1::GenerateRequest { adapter: adapter.to_owned(), ..request(&prompt, 12) };
    let mut answers = Vec::new();
    for adapter in ["", "one", "two"] {
        let first = generate(&mut client, asked(adapter)).await.unwrap();
        // Its own prefix is found again, those of the others are not.
        assert_eq!(first.prompt.unwrap().cached_tokens, 0, "{adapter:?}");
        let second = generate(&mut client, asked(adapter)).await.unwrap();
        assert_eq!(second.prompt.unwrap().cached_tokens, 32, "{adapter:?}");
        assert_eq!(first.choices[&0].tokens, second.choices[&0].tokens);
        answers.push(first.choices[&0].tokens.clone());
    }
    assert!(answers[0] != answers[1] && answers[0] != answers[2] && answers[1] != answers[2], "{answers:?}");
    let unknown = client.generate(asked("three")).await.unwrap_err();
    assert_eq!((unknown.code(), ErrorCode::of(&unknown)), (tonic::Code::NotFound, ErrorCode::ModelNotFound));
    let other = v1::GenerateRequest { adapter_fingerprint: prints[1].clone(), ..asked("one") };
    let other = client.generate(other).await.unwrap_err();
    assert_eq!(ErrorCode::of(&other), ErrorCode::FingerprintMismatch, "{other:?}");
    assert!(unknown.message().contains("\"three\"") && unknown.message().contains("one, two"), "{unknown:?}");
    worker.shutdown(Duration::ZERO).await;
}

#[test]
fn what_cannot_be_loaded_is_refused_at_the_start() {
    for (flags, part) in [
        ("--lora-modules one=@all", "--enable-lora"),
        (
            "--enable-lora --lora-modules one=@all two=@few --max-lora-rank 4",
            "raise --max-lora-rank from 4 to 8",
        ),
        ("--enable-lora --lora-modules one=@all two=@few --max-loras 1", "raise it to 2"),
        ("--enable-lora --lora-modules tiny=@all", "the model has this name"),
        ("--enable-lora --lora-modules one=@none", "adapter_config.json"),
    ] {
        let error = load(flags).err().unwrap_or_else(|| panic!("{flags} starts")).to_string();
        assert!(error.contains(part), "{flags}: {error:?} lacks {part:?}");
    }
}
