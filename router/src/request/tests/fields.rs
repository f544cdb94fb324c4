//! How an answer is drawn and what comes with it: fields, one by one.

use super::*;

#[test]
fn sampling_fields_out_of_range_are_refused_by_name() {
    // sampling-01, sampling-05.
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        let check = |changes, param, part| check_refused(endpoint, changes, param, part);
        check(json!({"temperature": -0.1}), "temperature", "at least 0, not -0.1");
        check(json!({"temperature": "hot"}), "temperature", "must be a number, not a string");
        check(json!({"temperature": 1e300}), "temperature", "at least 0, and fit 32 bits");
        check(json!({"top_p": 0}), "top_p", "above 0 and at most 1");
        check(json!({"top_p": 1.5}), "top_p", "1.5");
        check(json!({"top_k": -2}), "top_k", "at least -1");
        check(json!({"top_k": 1.5}), "top_k", "whole number, not 1.5");
        check(json!({"min_p": 2}), "min_p", "from 0 to 1");
        check(json!({"presence_penalty": 3}), "presence_penalty", "from -2 to 2");
        check(json!({"frequency_penalty": -3}), "frequency_penalty", "from -2 to 2");
        check(json!({"repetition_penalty": 0}), "repetition_penalty", "above 0");
        check(json!({"n": 0}), "n", "1 to 128, not 0");
        check(json!({"n": 129}), "n", "1 to 128, not 129");
        check(json!({"n": true}), "n", "whole number, not a boolean");
        check(json!({"max_tokens": 0}), "max_tokens", "at least 1, not 0");
        check(json!({"max_tokens": -5}), "max_tokens", "at least 1, not -5");
        check(json!({"max_tokens": 5_000_000_000_u64}), "max_tokens", "at most 4294967295");
        check(json!({"max_tokens": "many"}), "max_tokens", "not a string");
        check(json!({"min_tokens": 5, "max_tokens": 4}), "min_tokens", "more than max_tokens");
        check(json!({"seed": 1.5}), "seed", "whole number");
        check(json!({"stop": ""}), "stop", "empty string");
        check(json!({"stop": 3}), "stop", "string or an array of strings");
        check(json!({"stop": ["a", 1]}), "stop", "string or an array of strings");
        check(json!({"stop": vec!["x"; 17]}), "stop", "at most 16");
        check(json!({"stop": "x".repeat(1025)}), "stop", "1024 bytes");
        check(json!({"stop_token_ids": [259]}), "stop_token_ids[0]", "0 to 258");
        check(json!({"logit_bias": {"999": 1}}), "logit_bias.999", "no token id");
        check(json!({"logit_bias": {"x": 1}}), "logit_bias.x", "no token id");
        check(json!({"logit_bias": {"-1": 1}}), "logit_bias.-1", "no token id");
        check(json!({"logit_bias": {"5": 101}}), "logit_bias.5", "from -100 to 100");
        check(json!({"logit_bias": {"5": null}}), "logit_bias.5", "number");
        check(json!({"stream": "yes"}), "stream", "must be a boolean");
        check(json!({"stream_options": {"include_usage": true}}), "stream_options", "\"stream\": true");
        check(
            json!({"stream": true, "stream_options": {"include_usage": 1}}),
            "stream_options.include_usage",
            "boolean",
        );
        check(json!({"stream": true, "prompt_logprobs": 1}), "prompt_logprobs", "not available");
        check(json!({"prompt_logprobs": 21}), "prompt_logprobs", "0 to 20");
        check(json!({"cache_salt": ""}), "cache_salt", "1 to 256 bytes");
        check(json!({"model": null}), "model", "/v1/models");
        check(json!({"model": ""}), "model", "missing");
        check(json!({"model": 4}), "model", "string, not 4");
    }
}

#[test]
fn what_is_not_served_is_refused_and_never_ignored() {
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        let check = |changes, param| check_refused(endpoint, changes, param, "");
        check(json!({"response_format": "json"}), "response_format");
        check(json!({"structural_tag": {}}), "structural_tag");
        check(json!({"tool_choice": "required"}), "tool_choice");
        check(json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}), "tool_choice");
        check(json!({"best_of": 2}), "best_of");
        check(json!({"bad_words": ["no"]}), "bad_words");
        check(json!({"allowed_token_ids": [5]}), "allowed_token_ids");
        check(json!({"suffix": "x"}), "suffix");
        check(json!({"functions": []}), "functions");
        check_refused(endpoint, json!({"regex": "a+"}), "regex", "`guided_regex`");
        check_refused(endpoint, json!({"ebnf": "root ::= \"a\""}), "ebnf", "`guided_grammar`");
        check_refused(endpoint, json!({"grammar": "root ::= \"a\""}), "grammar", "`guided_grammar`");
        check_refused(endpoint, json!({"json_schema": {}}), "json_schema", "`guided_json`");
        accepted(endpoint, json!({"response_format": {"type": "text"}, "guided_json": null, "best_of": 1}));
        accepted(
            endpoint,
            json!({"tool_choice": "auto", "unknown_field": [1, 2], "user": "ann", "temperature": null}),
        );
    }
}

#[test]
fn an_answer_is_constrained_behind_thoughts() {
    let model = crate::test_support::entry("tiny", true);
    let accepts = |source: &GrammarSource, begun: bool, text: &str| {
        let source =
            source.behind_thoughts(begun, JsonBlanks::default(), None).expect("can stand behind thoughts");
        let grammar = model
            .tokenizer
            .grammars()
            .and_then(|grammars| grammars.compile(&source, JsonBlanks::default()))
            .expect("compiles");
        let mut matcher = grammar.matcher();
        let ids: Vec<u32> = text.bytes().map(u32::from).collect();
        matcher.consume(&ids).is_ok() && matcher.is_accepting()
    };
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                        "additionalProperties": false});
    let sources = [
        (GrammarSource::JsonSchema(schema.to_string()), r#"{"a": 1}"#, r#"{"b": 1}"#),
        (GrammarSource::JsonObject, r#"{"b": []}"#, "[]"),
        (GrammarSource::Regex("a/b+\\n?".to_owned()), "a/bb", "ab"),
        (GrammarSource::Choice(vec!["yes \"".to_owned(), "žluť".to_owned()]), "žluť", "no"),
    ];
    for (source, right, wrong) in sources {
        let check = |begun, text: &str, expected| {
            assert_eq!(accepts(&source, begun, text), expected, "{source:?} {text}")
        };
        check(true, &format!("hm, {{\n大阪</think>\n\n{right}"), true);
        check(true, &format!("</think>{right}"), true);
        check(true, &format!("hm</think>\n\n{wrong}"), false);
        check(true, right, false);
        check(false, &format!("<think>\nhm\n</think>\n\n{right}"), true);
        check(false, right, true);
        check(false, wrong, false);
        check(false, &format!("hm</think>{right}"), false);
    }
    assert_eq!(
        GrammarSource::Lark("start: \"a\"".to_owned()).behind_thoughts(true, JsonBlanks::default(), None),
        None
    );
}

#[test]
fn logprobs_have_one_form_per_endpoint() {
    // logprobs-05.
    let chat = |changes| accepted(Endpoint::Chat, changes).reply().logprobs;
    assert_eq!(chat(json!({})), None);
    assert_eq!(chat(json!({"logprobs": true})), Some(0));
    assert_eq!(chat(json!({"logprobs": true, "top_logprobs": 3})), Some(3));
    check_refused(Endpoint::Chat, json!({"top_logprobs": 3}), "top_logprobs", "\"logprobs\": true");
    check_refused(Endpoint::Chat, json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs", "0 to 20");
    check_refused(Endpoint::Chat, json!({"logprobs": 3}), "logprobs", "top_logprobs");
    check_refused(Endpoint::Chat, json!({"echo": true}), "echo", "/v1/completions");

    let completion = |changes| accepted(Endpoint::Completions, changes).reply().logprobs;
    assert_eq!(completion(json!({"logprobs": null})), None);
    assert_eq!(completion(json!({"logprobs": 0})), Some(0));
    assert_eq!(completion(json!({"logprobs": 5})), Some(5));
    check_refused(Endpoint::Completions, json!({"logprobs": true}), "logprobs", "not a boolean");
    check_refused(Endpoint::Completions, json!({"logprobs": -1}), "logprobs", "0 to 20");
    let echoed = accepted(Endpoint::Completions, json!({"echo": true, "logprobs": 2}));
    assert_eq!(echoed.sampling().prompt_logprobs, Some(2), "echo with logprobs needs those of the prompt");
}

#[test]
fn what_is_above_zero_stays_above_it() {
    let tiny = json!({"top_p": 1e-60, "repetition_penalty": 1e-300, "temperature": 1e-60, "min_p": 0.0});
    let sampling = accepted(Endpoint::Chat, tiny).sampling().clone();
    for value in [sampling.top_p, sampling.repetition_penalty, sampling.temperature] {
        assert_eq!(value, f32::MIN_POSITIVE);
    }
    assert_eq!(sampling.min_p, 0.0);
}

#[test]
fn sampling_arrives_as_asked() {
    let request = accepted(
        Endpoint::Chat,
        json!({
            "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1,
            "frequency_penalty": -1, "repetition_penalty": 1.1, "seed": -1, "min_tokens": 2,
            "stop_token_ids": [97], "ignore_eos": true, "logit_bias": {"98": -100}, "max_completion_tokens": 9,
            "priority": -3, "cache_salt": "s", "n": 2, "stop": "x", "stream": true,
            "stream_options": {"include_usage": true}, "return_token_ids": true,
            "include_stop_str_in_output": true, "skip_special_tokens": false,
        }),
    );
    let expected = v1::SamplingParams {
        temperature: 0.5,
        top_k: 5,
        top_p: 0.9,
        min_p: 0.1,
        presence_penalty: 1.0,
        frequency_penalty: -1.0,
        repetition_penalty: 1.1,
        seed: u64::MAX,
        min_tokens: 2,
        stop_token_ids: vec![97],
        ignore_eos: true,
        logit_bias: [(98, -100.0)].into(),
        ..v1::SamplingParams::default()
    };
    assert_eq!(*request.sampling(), expected);
    assert_eq!(request.max_tokens(), MaxTokens::Explicit(9));
    assert_eq!((request.priority(), request.cache_salt(), request.choices()), (-3, "s", 2));
    let reply = ReplyOptions {
        stream: true,
        include_usage: true,
        return_token_ids: true,
        stop: vec!["x".to_owned()],
        include_stop: true,
        ..ReplyOptions::default()
    };
    assert_eq!(*request.reply(), reply);

    let plain = accepted(Endpoint::Completions, json!({}));
    let defaults = v1::SamplingParams {
        temperature: 1.0,
        top_p: 1.0,
        repetition_penalty: 1.0,
        seed: 7,
        ..v1::SamplingParams::default()
    };
    assert_eq!(*plain.sampling(), defaults, "the seed is drawn where none was given");
    assert_eq!(accepted(Endpoint::Chat, json!({"top_k": -1, "seed": u64::MAX})).sampling().seed, u64::MAX);
}
