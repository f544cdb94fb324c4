//! Requests out of bounds, and what is said of them.

use super::parse::*;
use crate::pooling::Pooling;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;

fn model() -> ServedModel {
    ServedModel {
        names: vec!["tiny".to_owned(), "alias".to_owned()],
        fingerprint: vec![7; 32].into(),
        vocab_size: 100,
        max_model_len: 64,
        adapters: ["first", "second"].map(adapter).to_vec(),
        eos_ids: vec![2],
        embeds: true,
    }
}

fn adapter(name: &str) -> ServedAdapter {
    ServedAdapter { name: name.to_owned(), fingerprint: name.as_bytes().to_vec().into() }
}

fn sound() -> v1::GenerateRequest {
    v1::GenerateRequest {
        request_id: "r".to_owned(),
        model: "tiny".to_owned(),
        prompt_ids: vec![1, 2, 3],
        sampling: Some(v1::SamplingParams {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 8,
            ..Default::default()
        }),
        choices: vec![v1::ChoiceState::default()],
        ..Default::default()
    }
}

fn sampling(change: impl FnOnce(&mut v1::SamplingParams)) -> v1::GenerateRequest {
    let mut request = sound();
    change(request.sampling.as_mut().unwrap());
    request
}

fn changed(change: impl FnOnce(&mut v1::GenerateRequest)) -> v1::GenerateRequest {
    let mut request = sound();
    change(&mut request);
    request
}

fn check(request: v1::GenerateRequest, code: ErrorCode, says: &str) {
    let error = parse(request, &model()).unwrap_err();
    let status = tonic::Status::from(error);
    assert_eq!(ErrorCode::of(&status), code, "{status:?}");
    assert!(status.message().contains(says), "{:?} does not say {says:?}", status.message());
}

fn invalid(request: v1::GenerateRequest, says: &str) {
    check(request, ErrorCode::InvalidRequest, says);
}

#[test]
fn targets() {
    check(
        changed(|r| r.model = "Tiny".into()),
        ErrorCode::ModelNotFound,
        "model \"Tiny\" is not served here",
    );
    check(changed(|r| r.model = String::new()), ErrorCode::ModelNotFound, "tiny, alias");
    check(changed(|r| r.adapter = "lora".into()), ErrorCode::ModelNotFound, "adapter \"lora\"");
    check(changed(|r| r.adapter = "lora".into()), ErrorCode::ModelNotFound, "first, second");
    check(changed(|r| r.fingerprint = vec![8; 32].into()), ErrorCode::FingerprintMismatch, "fingerprint");
    check(changed(|r| r.fingerprint = vec![7; 31].into()), ErrorCode::FingerprintMismatch, "fingerprint");
    let another =
        changed(|r| (r.adapter, r.adapter_fingerprint) = ("first".into(), b"second".to_vec().into()));
    check(another, ErrorCode::FingerprintMismatch, "another adapter than \"first\"");
    let bare = ServedModel { adapters: Vec::new(), ..model() };
    let error = parse(changed(|r| r.adapter = "first".into()), &bare).unwrap_err().to_string();
    assert!(error.contains("\"first\" is not loaded here, but none is"), "{error}");
    let first = changed(|r| (r.adapter, r.adapter_fingerprint) = ("first".into(), b"first".to_vec().into()));
    assert!(parse(first, &model()).is_ok());
    assert!(parse(changed(|r| r.fingerprint = vec![7; 32].into()), &model()).is_ok());
    assert!(parse(changed(|r| r.model = "alias".into()), &model()).is_ok());
    let adapted = |name: &str| parse(changed(|r| r.adapter = name.into()), &model()).unwrap();
    assert_eq!(["", "first", "second"].map(|name| adapted(name).adapter.0), [0, 1, 2]);
    assert!(adapted("first").root != adapted("").root && adapted("first").root != adapted("second").root);
}

#[test]
fn prompts() {
    invalid(changed(|r| r.prompt_ids.clear()), "prompt_ids is empty");
    invalid(changed(|r| r.prompt_ids[1] = 100), "prompt_ids[1] is 100, out of the vocabulary of 100");
    invalid(changed(|r| r.prompt_ids[0] = u32::MAX), "prompt_ids[0] is 4294967295");
    check(
        changed(|r| r.prompt_ids = vec![1; 64]),
        ErrorCode::ContextLengthExceeded,
        "has 64 tokens with its output",
    );
    assert!(parse(changed(|r| r.prompt_ids = vec![1; 63]), &model()).is_ok());
    let alone =
        |tokens| v1::GenerateRequest { prompt_ids: vec![1; tokens], ..sampling(|s| s.max_tokens = 0) };
    assert_eq!(
        parse(alone(64), &model()).unwrap().max_tokens,
        0,
        "without output it may be all of the context"
    );
    check(alone(65), ErrorCode::ContextLengthExceeded, "has 65 tokens");
}

#[test]
fn sampling_parameters() {
    invalid(changed(|r| r.sampling = None), "sampling is missing");
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.1] {
        invalid(sampling(|s| s.temperature = bad), "sampling.temperature is");
    }
    for bad in [f32::NAN, 0.0, -0.5, 1.5, f32::INFINITY] {
        invalid(sampling(|s| s.top_p = bad), "sampling.top_p is");
    }
    for bad in [f32::NAN, -0.5, 1.5] {
        invalid(sampling(|s| s.min_p = bad), "sampling.min_p is");
    }
    for bad in [f32::NAN, -2.5, 2.5] {
        invalid(sampling(|s| s.presence_penalty = bad), "sampling.presence_penalty is");
        invalid(sampling(|s| s.frequency_penalty = bad), "sampling.frequency_penalty is");
    }
    for bad in [f32::NAN, 0.0, -1.0, f32::INFINITY] {
        invalid(sampling(|s| s.repetition_penalty = bad), "sampling.repetition_penalty is");
    }
    invalid(sampling(|s| s.min_tokens = 9), "sampling.min_tokens is above max_tokens");
    invalid(sampling(|s| s.logprobs = Some(21)), "sampling.logprobs is 21, must be at most 20");
    invalid(sampling(|s| s.prompt_logprobs = Some(21)), "sampling.prompt_logprobs is 21");
    invalid(sampling(|s| s.stop_token_ids = vec![1, 100]), "sampling.stop_token_ids[1] is 100");
    invalid(sampling(|s| s.stop_token_ids = vec![1; 257]), "sampling.stop_token_ids has 257 entries");
    invalid(
        sampling(|s| s.logit_bias = (0..1025).map(|id| (id, 1.0)).collect()),
        "sampling.logit_bias has 1025",
    );
    invalid(sampling(|s| s.logit_bias = [(100, 1.0)].into()), "sampling.logit_bias[100]");
    invalid(sampling(|s| s.logit_bias = [(5, 1e9)].into()), "sampling.logit_bias[5] is 1000000000");
    invalid(sampling(|s| s.logit_bias = [(5, f32::NAN)].into()), "sampling.logit_bias[5] is NaN");
}

#[test]
fn choices() {
    let choice = |index, output_ids, finished| v1::ChoiceState { index, output_ids, finished };
    invalid(changed(|r| r.choices.clear()), "choices is empty");
    invalid(changed(|r| r.choices.push(r.choices[0].clone())), "choices[1].index is 0 a second time");
    invalid(changed(|r| r.choices = vec![choice(0, vec![1], true)]), "choices are all finished");
    invalid(changed(|r| r.choices = vec![choice(0, vec![1, 200], false)]), "choices[0].output_ids[1] is 200");
    invalid(
        changed(|r| r.choices = vec![choice(0, vec![1; 9], false)]),
        "choices[0].output_ids has more than max_tokens",
    );
    let complete = parse(changed(|r| r.choices = vec![choice(0, vec![1; 8], false)]), &model());
    assert_eq!(complete.unwrap().choices[0].output.len(), 8);
    invalid(
        changed(|r| r.choices = (0..129).map(|i| choice(i, vec![], false)).collect()),
        "choices has over 128",
    );
    let long = sampling(|s| s.max_tokens = 1000);
    let long = v1::GenerateRequest { choices: vec![choice(0, vec![1; 62], false)], ..long };
    check(long, ErrorCode::ContextLengthExceeded, "has 65 tokens with its output");
}

#[test]
fn what_is_sound_arrives_whole() {
    let request = changed(|r| {
        r.attempt_id = 9;
        r.priority = -3;
        r.router_id = "router".into();
        r.booking = 4;
        r.choices = vec![
            v1::ChoiceState { index: 1, output_ids: vec![5, 6], finished: false },
            v1::ChoiceState { index: 0, output_ids: vec![], finished: true },
        ];
        let s = r.sampling.as_mut().unwrap();
        s.stop_token_ids = vec![9, 2, 1];
        s.temperature = 1e-30;
        s.logprobs = Some(0);
        s.logit_bias = [(7, 1.0), (3, -100.0)].into();
    });
    let parsed = parse(request, &model()).unwrap();
    assert_eq!(parsed.attempt.0, 9);
    assert_eq!(parsed.priority, -3);
    assert_eq!(parsed.booking, Some(("router".to_owned(), 4)));
    assert_eq!(parsed.prompt[..], [1, 2, 3]);
    assert_eq!(parsed.choices[0].output, [5, 6]);
    assert!(parsed.choices[1].finished);
    assert_eq!(parsed.sampling.end_ids, [1, 2, 9]);
    assert_eq!(parsed.sampling.temperature, 0.0);
    assert_eq!(parsed.sampling.logprobs, Some(0));
    assert_eq!(parsed.sampling.logit_bias, [(3, -100.0), (7, 1.0)]);
    let ignoring = parse(sampling(|s| s.ignore_eos = true), &model()).unwrap();
    assert!(ignoring.sampling.end_ids.is_empty());
}

#[test]
fn roots_part_scopes_and_salts() {
    let root = |scope: &str, salt: &str| {
        let scope = v1::CacheScope { scope: scope.into(), salt: salt.into() };
        parse(changed(|r| r.cache_scope = Some(scope)), &model()).unwrap().root
    };
    assert_eq!(root("a", "b"), root("a", "b"));
    assert_ne!(root("a", "b"), root("ab", ""));
    assert_ne!(root("a", "b"), root("b", "a"));
}

#[test]
fn embeddings() {
    let embed = |change: fn(&mut v1::GenerateRequest)| {
        let mut request = changed(|r| (r.pooling, r.sampling) = (v1::Pooling::Mean.into(), None));
        change(&mut request);
        request
    };
    let parsed = parse(embed(|r| (r.adapter, r.priority) = ("first".into(), 3)), &model()).unwrap();
    assert_eq!((parsed.pooling, parsed.max_tokens, parsed.priority), (Some(Pooling::Mean), 0, 3));
    assert_eq!((parsed.choices.len(), parsed.adapter.0), (1, 1));
    assert!(parse(embed(|r| r.prompt_ids = vec![1; 64]), &model()).is_ok(), "no room for output is needed");
    let long = embed(|r| r.prompt_ids = vec![1; 65]);
    check(long, ErrorCode::ContextLengthExceeded, "has 65 tokens");
    invalid(embed(|r| r.pooling = 77), "pooling is of no kind");
    invalid(
        embed(|r| r.choices.push(v1::ChoiceState { index: 1, ..Default::default() })),
        "choices must be one",
    );
    invalid(embed(|r| r.choices[0].output_ids = vec![1]), "choices must be one");
    invalid(embed(|r| r.grammar = Some(v1::Grammar::default())), "grammar has no meaning");
    let elsewhere = parse(embed(|_| {}), &ServedModel { embeds: false, ..model() }).unwrap_err();
    assert!(elsewhere.to_string().contains("a worker with the feature `embed`"), "{elsewhere}");
}
