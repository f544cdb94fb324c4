//! Tokens in, text out. The tokenizer has one token per byte.

use std::sync::Arc;

use serde_json::{Value, json};
use thalweg_proto::v1::{ChoiceDelta, FinishReason, PromptInfo, TokenLogprobs, TopLogprob};

use super::choice::{Finish, StopReason};
use super::*;
use crate::config::Surface;
use crate::request::{Served, parse_completion, parse_object};
use crate::test_support::models;
use crate::test_support::tokenizer::END;
use crate::tokenize::tokenize_request;

fn assembly(fields: Value) -> Assembly {
    let mut body = json!({"model": "tiny", "prompt": "p"});
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    let models = models();
    let served = Served { models: &models, choices_max: 128, surface: &Surface::default(), draw_seed: &|| 0 };
    let object = parse_object(body.to_string().as_bytes()).expect("JSON");
    let mut request = parse_completion(object, &served).unwrap_or_else(|error| panic!("{}", error.message));
    let prompts = tokenize_request(&mut request).expect("fits");
    Assembly::new(Arc::new(request), &prompts)
}

fn delta(index: u32, token_ids: &[u32], finish: FinishReason) -> ChoiceDelta {
    let logprobs = token_ids
        .iter()
        .map(|id| TokenLogprobs { token_id: *id, logprob: -1.0, rank: 1, top: vec![] })
        .collect();
    ChoiceDelta { index, token_ids: token_ids.to_vec(), logprobs, finish_reason: finish.into() }
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Sends `text` in deltas of `step` tokens, the last with `finish`; END is appended when that is a stop.
fn run(fields: Value, text: &str, step: usize, finish: FinishReason) -> (Vec<String>, Option<Finish>, Usage) {
    let mut assembly = assembly(fields);
    let mut ids = bytes(text);
    if finish == FinishReason::Stop {
        ids.push(END);
    }
    let deltas: Vec<_> = ids.chunks(step).collect();
    let mut pieces = Vec::new();
    for (at, ids) in deltas.iter().enumerate() {
        let last = at + 1 == deltas.len();
        let delta = delta(0, ids, if last { finish } else { FinishReason::Unspecified });
        assembly.push(0, GenerationEvent::Deltas(vec![delta]), &mut pieces).expect("sound");
    }
    let finish = pieces.iter().find_map(|p| p.finish.clone());
    assert_eq!(assembly.finished(), finish.is_some());
    (pieces.into_iter().map(|p| p.text).collect(), finish, assembly.usage())
}

#[test]
fn characters_are_never_split() {
    // streaming-04.
    let text = "žluť 大阪 🍋👨‍👩‍👦 สวัสดี";
    for step in 1..5 {
        let (pieces, finish, usage) = run(json!({}), text, step, FinishReason::Stop);
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|p| !p.contains(char::REPLACEMENT_CHARACTER)));
        assert_eq!(finish, Some(Finish { reason: "stop", stop: None }));
        assert_eq!(usage.completion_tokens as usize, text.len() + 1, "the end counts as a token");
    }
}

#[test]
fn a_character_cut_off_by_the_end_is_left_out() {
    let mut assembly = assembly(json!({}));
    let mut pieces = Vec::new();
    let delta = delta(0, &[97, 0xf0, 0x9f], FinishReason::Length);
    assembly.push(0, GenerationEvent::Deltas(vec![delta]), &mut pieces).expect("sound");
    assert_eq!(pieces[0].text, "a");
    assert_eq!(pieces[0].finish, Some(Finish { reason: "length", stop: None }));
}

#[test]
fn stop_strings_end_the_text_wherever_tokens_end() {
    // stop-01.
    let text = "one two three four";
    let check = |stop: Value, expected: &str, which: Option<&str>, tokens: usize| {
        for step in 1..6 {
            let (pieces, finish, usage) =
                run(json!({"stop": stop, "max_tokens": 50}), text, step, FinishReason::Length);
            assert_eq!(pieces.concat(), expected, "{stop} by {step}");
            let reason = if which.is_some() { "stop" } else { "length" };
            let stop = which.map(|w| StopReason::Text(w.to_owned()));
            assert_eq!(finish, Some(Finish { reason, stop }));
            assert_eq!(usage.completion_tokens as usize, tokens);
        }
    };
    check(json!("three"), "one two ", Some("three"), 13);
    check(json!(["o three f"]), "one tw", Some("o three f"), 15);
    check(json!(["four!", "zzz"]), text, None, 18);
    check(json!(["two", "one two"]), "", Some("one two"), 7);
    check(json!("😀"), text, None, 18);
}

#[test]
fn what_is_held_back_at_the_end_is_delivered() {
    // stop-02.
    for finish in [FinishReason::Stop, FinishReason::Length] {
        let (pieces, _, _) = run(json!({"stop": "sunflower oil"}), "big sunfl", 1, finish);
        assert_eq!(pieces.concat(), "big sunfl");
    }
}

#[test]
fn stops_respect_min_tokens_and_can_be_left_in() {
    let (pieces, _, _) = run(json!({"stop": "a", "min_tokens": 3}), "ababab", 1, FinishReason::Length);
    assert_eq!(pieces.concat(), "abab");
    let (pieces, _, _) =
        run(json!({"stop": "ab", "include_stop_str_in_output": true}), "xxabab", 2, FinishReason::Length);
    assert_eq!(pieces.concat(), "xxab");
}

#[test]
fn a_stop_token_is_named_and_its_text_left_out() {
    let run_ids = |fields: Value| {
        let mut assembly = assembly(fields);
        let mut pieces = Vec::new();
        let delta = delta(0, &[97, 98], FinishReason::Stop);
        assembly.push(0, GenerationEvent::Deltas(vec![delta]), &mut pieces).expect("sound");
        (pieces[0].text.clone(), pieces[0].finish.clone().and_then(|f| f.stop))
    };
    let stop = Some(StopReason::Token(98));
    assert_eq!(run_ids(json!({"stop_token_ids": [98]})), ("a".to_owned(), stop.clone()));
    let include = json!({"stop_token_ids": [98], "include_stop_str_in_output": true});
    assert_eq!(run_ids(include), ("ab".to_owned(), stop));
}

#[test]
fn choices_of_several_prompts_keep_apart() {
    let mut assembly = assembly(json!({"prompt": ["alpha", "beta"], "n": 2}));
    let mut pieces = Vec::new();
    let mut push = |assembly: &mut Assembly, prompt, index, text| {
        let deltas = vec![delta(index, &bytes(text), FinishReason::Length)];
        assembly.push(prompt, GenerationEvent::Deltas(deltas), &mut pieces).expect("sound");
    };
    push(&mut assembly, 1, 0, "c");
    push(&mut assembly, 0, 1, "b");
    assert!(!assembly.prompt_finished(0));
    push(&mut assembly, 0, 0, "a");
    assert!(assembly.prompt_finished(0) && !assembly.finished());
    push(&mut assembly, 1, 1, "dd");
    assert!(assembly.finished());
    let got: Vec<_> = pieces.iter().map(|p| (p.choice, p.text.as_str())).collect();
    assert_eq!(got, [(2, "c"), (1, "b"), (0, "a"), (3, "dd")]);
    assert_eq!(
        assembly.usage(),
        Usage { prompt_tokens: 6 + 5, cached_tokens: 0, completion_tokens: 5, ..Usage::default() }
    );
}

#[test]
fn usage_tells_cached_tokens_once() {
    let mut assembly = assembly(json!({}));
    let info = |cached_tokens| GenerationEvent::Prompt(PromptInfo { cached_tokens, ..PromptInfo::default() });
    assembly.push(0, info(16), &mut Vec::new()).expect("sound");
    assembly.push(0, info(32), &mut Vec::new()).expect("sound");
    assert_eq!(assembly.usage().cached_tokens, 16, "what a second worker found is no reuse of the client's");
    let json = serde_json::to_value(assembly.usage()).expect("JSON");
    let expected = json!({"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2,
                          "prompt_tokens_details": {"cached_tokens": 16}});
    assert_eq!(json, expected);
}

#[test]
fn faults_of_a_worker_are_errors() {
    let fails = |fields: Value, delta: ChoiceDelta| {
        assembly(fields).push(0, GenerationEvent::Deltas(vec![delta]), &mut Vec::new()).is_err()
    };
    assert!(fails(json!({}), delta(1, &[97], FinishReason::Unspecified)), "no such choice");
    assert!(fails(json!({}), delta(0, &[97], FinishReason::Abort)), "given up");
    let bare = ChoiceDelta { logprobs: vec![], ..delta(0, &[97], FinishReason::Unspecified) };
    assert!(fails(json!({"logprobs": 1}), bare), "a short array of logprobs is never handed out");
}

#[test]
fn logprobs_are_finite_and_shaped_as_clients_know_them() {
    // logprobs-01.
    let tokenizer = Arc::clone(&models().get("tiny").expect("served").tokenizer);
    let top = |token_id, logprob| TopLogprob { token_id, logprob };
    let token = |token_id, logprob: f32| choice::TokenInfo {
        logprobs: TokenLogprobs {
            token_id,
            logprob,
            rank: 3,
            top: vec![top(98, -0.5), top(99, f32::NEG_INFINITY)],
        },
        text_offset: 4,
    };
    let texts = logprobs::TokenNames { tokenizer: &tokenizer, are_ids: false };
    let chat = logprobs::ChatLogprobs::new(texts, &[token(97, f32::NAN)]);
    let scored =
        |token: &str, logprob: f64| json!({"token": token, "logprob": logprob, "bytes": token.as_bytes()});
    let mut entry = scored("a", -9999.0);
    entry["top_logprobs"] = json!([scored("b", -0.5), scored("c", -9999.0)]);
    assert_eq!(serde_json::to_value(chat).expect("JSON"), json!({"content": [entry]}));

    let infos = [token(97, f32::NEG_INFINITY), token(97, -2.0)];
    let legacy = logprobs::CompletionLogprobs::new(texts, &infos, 1, true);
    let expected = json!({
        "tokens": ["a", "a"], "token_logprobs": [null, -2.0],
        "top_logprobs": [null, {"a": -2.0, "b": -0.5}], "text_offset": [4, 4],
    });
    assert_eq!(serde_json::to_value(legacy).expect("JSON"), expected);

    // Bytes that are no text by themselves have names of their own, so that each keeps its value.
    let mut chosen = token(128, -2.0);
    chosen.logprobs.top = vec![top(129, -0.25), top(97, -3.0)];
    let legacy = logprobs::CompletionLogprobs::new(texts, std::slice::from_ref(&chosen), 2, false);
    let legacy = serde_json::to_value(legacy).expect("JSON");
    assert_eq!(legacy["tokens"], json!(["bytes:\\x80"]));
    assert_eq!(legacy["top_logprobs"], json!([{"bytes:\\x80": -2.0, "bytes:\\x81": -0.25, "a": -3.0}]));

    let ids = logprobs::TokenNames { are_ids: true, ..texts };
    let legacy = logprobs::CompletionLogprobs::new(ids, &infos, 1, true);
    let expected = json!({
        "tokens": ["token_id:97", "token_id:97"], "token_logprobs": [null, -2.0],
        "top_logprobs": [null, {"token_id:97": -2.0, "token_id:98": -0.5}], "text_offset": [4, 4],
    });
    assert_eq!(serde_json::to_value(legacy).expect("JSON"), expected);
    let chat = serde_json::to_value(logprobs::ChatLogprobs::new(ids, &[token(97, -1.0)])).expect("JSON");
    let named = json!({"token": "token_id:97", "logprob": -1.0, "bytes": [97]});
    assert_eq!(chat["content"][0]["token"], named["token"]);
    assert_eq!(chat["content"][0]["bytes"], named["bytes"]);

    let raw: Vec<_> = infos.iter().map(|i| i.logprobs.clone()).collect();
    let prompt = logprobs::prompt_logprobs(&tokenizer, &raw, 1);
    let expected = json!([null, {
        "97": {"logprob": -2.0, "rank": 3, "decoded_token": "a"},
        "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
    }]);
    assert_eq!(prompt, expected);
}

#[test]
fn echo_places_tokens_in_the_echoed_text() {
    // logprobs-04.
    let check = |fields: serde_json::Value, text: &str, expected: &[usize]| {
        let assembly = assembly(fields);
        let echo = assembly.echo(0).expect("asked for");
        assert_eq!((echo.text(), echo.characters()), (text, text.chars().count()));
        let raw = vec![TokenLogprobs::default(); expected.len() + 1];
        let offsets: Vec<_> = echo.token_infos(&raw).iter().map(|info| info.text_offset).collect();
        assert_eq!(offsets, expected, "{text}");
    };
    // A beginning of sequence that was added is at the text's beginning, and the two bytes of a letter where it is.
    check(json!({"prompt": "až", "echo": true}), "až", &[0, 0, 1, 1]);
    check(json!({"prompt": "až", "echo": true, "skip_special_tokens": false}), "až", &[0, 0, 1, 1]);
    check(json!({"prompt": "<s>a", "echo": true, "add_special_tokens": false}), "<s>a", &[0, 3]);
    check(json!({"prompt": "a<|im_end|>b", "echo": true}), "a<|im_end|>b", &[0, 0, 1, 11]);
    // Of ids there is no other text than theirs.
    check(json!({"prompt": [256, 97], "echo": true}), "a", &[0, 0]);
    check(json!({"prompt": [256, 97], "echo": true, "skip_special_tokens": false}), "<s>a", &[0, 3]);
}
