//! Templates that are wrong, refuse or never end.

use serde_json::json;
use thalweg_model::chat_template::ChatTemplate;

use crate::{compile, render, tokenizer};

#[test]
fn a_template_that_does_not_compile_says_where() {
    let check = |source: &str, expected: &str| {
        let error = ChatTemplate::new(source, tokenizer().bundle()).unwrap_err().to_string();
        assert!(error.contains("does not compile") && error.contains(expected), "{error}");
    };
    check("{% for message in messages %}", "chat:1");
    check("a\n{{ ) }}", "chat:2");
    check("{% unknown %}", "unknown");
    check("{%} {% generation %}", "chat:1");
    check("a\n{% generation", "chat:2");
}

#[test]
fn a_refusal_is_given_in_the_template_s_words() {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let check = |source: &str, expected: &str| {
        let error = render(&compile(source), &messages).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check("{{ raise_exception('no ' + messages[0].role) }}", "chat template: no user");
    check("{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}", "deep");
    check("{{ messages[0].missing.field }}", "undefined");
    check("{{ nobody() }}", "nobody");
}

#[test]
fn a_template_cannot_hang_or_exhaust_the_stack() {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let check = |source: &str| assert!(render(&compile(source), &messages).is_err());
    check("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
    let digits = "range(99999)";
    check(&format!("{{% for a in {digits} %}}{{% for b in {digits} %}}{{% endfor %}}{{% endfor %}}"));
}
