//! Limits of keys and models, and models that are not there.

use super::*;

#[test]
fn a_keys_limit_is_told_of_the_field_that_was_sent() {
    let grant = Grant { output_tokens_max: Some(5), ..Grant::open() };
    let check = |endpoint, field: &str| {
        let error = accepted(endpoint, json!({field: 6})).restrict(&grant).expect_err("over the limit");
        assert_eq!(error.param.as_deref(), Some(field));
        assert!(error.message.starts_with(&format!("`{field}` is 6")), "{}", error.message);
        accepted(endpoint, json!({field: 5})).restrict(&grant).expect("within the limit");
    };
    check(Endpoint::Chat, "max_tokens");
    check(Endpoint::Chat, "max_completion_tokens");
    check(Endpoint::Completions, "max_tokens");
}

#[test]
fn unknown_models_are_404_with_the_name_as_sent() {
    for name in ["nope", "TINY", " tiny "] {
        let error = refused(Endpoint::Chat, json!({"model": name}));
        assert_eq!((error.code, error.param.as_deref()), (ErrorCode::ModelNotFound, Some("model")));
        assert!(error.message.contains(&format!("`{name}`")) && error.message.contains("tiny"));
    }
}

#[test]
fn the_404_among_many_names_tells_some_and_how_many_more() {
    let models = Models::default();
    let names = (0..40).map(|number| format!("adapter-{number:02}-{}", "x".repeat(500)));
    models.replace(names.map(|name| (name.clone(), entry(&name, false))).collect(), |_| true);
    let error = common::find_model("nope", &models).err().expect("unknown");
    assert!(error.message.ends_with("and 28 more, which GET /v1/models lists"), "{}", error.message);
    assert!(error.message.len() < 2_000, "{}", error.message.len());
    assert!(error.message.contains("adapter-11") && !error.message.contains("adapter-12"));
}

#[test]
fn what_is_over_the_context_is_refused_with_the_numbers() {
    // api-03.
    let check = |endpoint, changes, parts: &[&str]| {
        let error = refused(endpoint, changes);
        assert_eq!(error.code, ErrorCode::ContextLengthExceeded);
        parts
            .iter()
            .for_each(|part| assert!(error.message.contains(part), "{part:?} is not in {:?}", error.message));
    };
    let ids = |count: usize| vec![97; count];
    check(Endpoint::Completions, json!({"prompt": ids(600)}), &["512", "600"]);
    check(Endpoint::Completions, json!({"prompt": ids(512)}), &["512"]);
    check(Endpoint::Completions, json!({"prompt": ids(400), "max_tokens": 200}), &["512", "400", "200"]);
    let alone = json!({"max_tokens": 512, "truncate_prompt_tokens": -1});
    check(
        Endpoint::Completions,
        alone,
        &["512", "max_tokens is 512, which leaves no room", "; lower max_tokens"],
    );
    let long = "a".repeat(600);
    check(Endpoint::Chat, json!({"messages": [{"role": "user", "content": long}]}), &["512"]);
    let huge = "ž".repeat(1 << 20);
    check(Endpoint::Chat, json!({"messages": [{"role": "user", "content": huge}]}), &["512", "more than"]);
    check(Endpoint::Completions, json!({"prompt": huge, "max_tokens": 9}), &["512", "more than", "9"]);

    // Of several prompts the one that is too long is named.
    let several = refused(Endpoint::Completions, json!({"prompt": [ids(5), ids(600)]}));
    assert_eq!(several.param.as_deref(), Some("prompt[1]"), "{}", several.message);
    assert!(several.message.contains("600") && several.message.contains("prompt[1]"), "{}", several.message);

    let room = |changes| tokenized(Endpoint::Completions, changes)[0].max_tokens;
    assert_eq!(room(json!({"prompt": ids(312), "max_tokens": 200})), 200);
    assert_eq!(room(json!({"prompt": ids(10)})), 16, "OpenAI's default");
    assert_eq!(room(json!({"prompt": ids(510)})), 2, "a default gives way to the context");
    let scored = |count| json!({"prompt": ids(count), "echo": true, "max_tokens": 0});
    assert_eq!(room(scored(512)), 0, "a prompt alone may be all of it");
    check(Endpoint::Completions, scored(513), &["512", "513"]);
    assert_eq!(
        tokenized(Endpoint::Chat, json!({}))[0].max_tokens as usize + 22,
        512,
        "a chat may use all of it"
    );
}
