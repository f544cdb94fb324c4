//! Texts of each family, whole and in pieces.

use super::*;
use crate::test_support::read_calls;

fn plan(format: ToolFormat) -> ToolPlan {
    let names = ["get_weather", "add"].map(str::to_owned);
    ToolPlan { format, names: names.into(), parallel: true, named: None }
}

/// Reads `text` whole, cut in two anywhere, and character by character: always the same.
fn check_plan(plan: &ToolPlan, text: &str, content: &str, calls: &[(&str, &str)], whole: bool) {
    let calls: Vec<_> = calls.iter().map(|(n, a)| ((*n).to_owned(), (*a).to_owned())).collect();
    let expected = (content.to_owned(), calls, whole);
    for at in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
        assert_eq!(read_calls(plan, [&text[..at], &text[at..]]), expected, "{text:?} cut at {at}");
    }
    assert_eq!(read_calls(plan, text.split("")), expected, "{text:?} by characters");
}

fn check(format: ToolFormat, text: &str, content: &str, calls: &[(&str, &str)]) {
    check_plan(&plan(format), text, content, calls, !calls.is_empty());
}

const OSLO: (&str, &str) = ("get_weather", r#"{"city": "Oslo"}"#);
const SUM: (&str, &str) = ("add", r#"{"a": [1, {"b": "}"}], "c": "\"{"}"#);

#[test]
fn hermes() {
    let oslo = r#"{"name": "get_weather", "arguments": {"city": "Oslo"}}"#;
    let sum = r#"{"name": "add", "arguments": {"a": [1, {"b": "}"}], "c": "\"{"}}"#;
    let check = |text: &str, content: &str, calls: &[_]| check(ToolFormat::Hermes, text, content, calls);
    check(&format!("<tool_call>\n{oslo}\n</tool_call>"), "", &[OSLO]);
    // A brace too few, and too many.
    check(&format!("<tool_call>{}</tool_call>", &oslo[..oslo.len() - 1]), "", &[OSLO]);
    check(&format!("<tool_call>{oslo}}}\n</tool_call>"), "", &[OSLO]);
    check(&format!("\n\nLet me see.\n<tool_call>{oslo}</tool_call>\n"), "\n\nLet me see.\n", &[OSLO]);
    check(&format!("<tool_call>\n{oslo}\n</tool_call>\n<tool_call>\n{sum}\n</tool_call>"), "", &[OSLO, SUM]);
    // SmolLM2 writes a list.
    check(&format!("<tool_call>[{oslo}, {sum}]</tool_call>"), "", &[OSLO, SUM]);
    check(&format!("<tool_call>{oslo}</tool_call> done"), " done", &[OSLO]);
    check(&format!("<tool_call>{oslo}"), "", &[OSLO]);
    check(&format!("<tool_call>{oslo}</tool_ca"), "", &[OSLO]);
    check(r#"<tool_call>{"name": "add"}</tool_call>"#, "", &[("add", "{}")]);
}

#[test]
fn odd_objects_are_calls_too() {
    let check = |text: &str, calls: &[_]| check(ToolFormat::Hermes, text, "", calls);
    let compact = ("get_weather", r#"{"city":"Oslo"}"#);
    check(r#"<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>"#, &[compact]);
    check(
        r#"<tool_call>{"name": "get_weather", "arguments": "{\"city\":\"Oslo\"}"}</tool_call>"#,
        &[compact],
    );
    check(
        r#"<tool_call>{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Oslo"}}}</tool_call>"#,
        &[compact],
    );
    check(
        r#"<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": 7}</tool_call>"#,
        &[OSLO],
    );
    let with_feed =
        "<tool_call>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Os\nlo\"}}</tool_call>";
    check(with_feed, &[("get_weather", r#"{"city": "Os\nlo"}"#)]);
}

#[test]
fn llama() {
    let oslo = r#"{"name": "get_weather", "parameters": {"city": "Oslo"}}"#;
    let sum = r#"{"name": "add", "parameters": {"a": [1, {"b": "}"}], "c": "\"{"}}"#;
    let check = |text: &str, content: &str, calls: &[_]| check(ToolFormat::Llama3Json, text, content, calls);
    check(oslo, "", &[OSLO]);
    check(&format!(" \n{oslo}"), "", &[OSLO]);
    check(&format!("<|python_tag|>{oslo}"), "", &[OSLO]);
    check(&format!("{oslo}; {sum}"), "", &[OSLO, SUM]);
    check(&format!("{oslo}\n{sum}"), "", &[OSLO, SUM]);
    check(&format!("<|python_tag|>{oslo}; {sum}"), "", &[OSLO, SUM]);
    check(&format!("I call {oslo}"), &format!("I call {oslo}"), &[]);
    check("<|python_tag|>print(1)", "<|python_tag|>print(1)", &[]);
    check(r#"{"city": "Oslo"}"#, r#"{"city": "Oslo"}"#, &[]);
    check("{curly} words", "{curly} words", &[]);
}

#[test]
fn mistral() {
    let oslo = r#"{"name": "get_weather", "arguments": {"city": "Oslo"}}"#;
    let sum = r#"{"name": "add", "arguments": {"a": [1, {"b": "}"}], "c": "\"{"}}"#;
    let check = |text: &str, content: &str, calls: &[_]| check(ToolFormat::Mistral, text, content, calls);
    check(&format!("[TOOL_CALLS][{oslo}]"), "", &[OSLO]);
    check(&format!("[TOOL_CALLS] [{oslo}, {sum}]"), "", &[OSLO, SUM]);
    check(&format!("Well. [TOOL_CALLS][{oslo}]"), "Well. ", &[OSLO]);
    let (city, args) = (r#"get_weather{"city": "Oslo"}"#, format!("add[CALL_ID]ab[ARGS]{}", SUM.1));
    check(&format!("[TOOL_CALLS]{city}[TOOL_CALLS]{args}"), "", &[OSLO, SUM]);
    check("a [list] of [TOOL_CALL", "a [list] of [TOOL_CALL", &[]);
    check("[TOOL_CALLS]nobody{\"a\": 1}", "[TOOL_CALLS]nobody{\"a\": 1}", &[]);
}

#[test]
fn gemma() {
    let oslo = r#"{"name": "get_weather", "parameters": {"city": "Oslo"}}"#;
    let check = |text: &str, content: &str, calls: &[_]| check(ToolFormat::Gemma3, text, content, calls);
    let compact = ("get_weather", r#"{"city":"Oslo"}"#);
    check(oslo, "", &[OSLO]);
    check(&format!("[{oslo}]"), "", &[OSLO]);
    check(&format!("```json\n{oslo}\n```"), "", &[OSLO]);
    check("```tool_code\nget_weather(city=\"Oslo\")\n```", "", &[compact]);
    check(
        "```tool_code\nprint(get_weather(city='Oslo'))\nadd(a=1, b=[1.5, None], c={'d': True},)\n```",
        "",
        &[compact, ("add", r#"{"a":1,"b":[1.5,null],"c":{"d":true}}"#)],
    );
    check("Sure:\n```tool_code\n[get_weather(city=\"Oslo\")]\n```", "Sure:\n", &[compact]);
    let code = "```tool_code\nimport os\n```";
    check(code, code, &[]);
    check("```json\n{\"a\": 1}\n```", "```json\n{\"a\": 1}\n```", &[]);
}

#[test]
fn text_that_is_no_call_is_never_lost() {
    for format in [
        ToolFormat::Hermes,
        ToolFormat::Llama3Json,
        ToolFormat::Mistral,
        ToolFormat::Gemma3,
        ToolFormat::Json,
    ] {
        for text in [
            "",
            " ",
            "plain words\n\nand more ",
            "<tool_call>",
            "<tool_call>\n{\"name\": \"nobody\", \"arguments\": {}}\n</tool_call>",
            "<tool_call>{\"name\": \"add\"",
            "<tool_call>[]</tool_call>",
            "<tool_call><tool_ca",
            "[TOOL_CALLS]",
            "[TOOL_CALLS][{\"na",
            "{\"name\": \"nobody\"}",
            "{\"name\": 7, \"parameters\": {}}",
            "{\"name\": \"add\", \"parameters\": 7}",
            "```tool_code\nadd(",
            "[1, 2]",
            "žluť <大阪> {🍋}",
        ] {
            check(format, text, text, &[]);
        }
    }
    let twice = "<tool_call>\n<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    check(ToolFormat::Hermes, twice, "<tool_call>\n", &[("add", "{}")]);
}

#[test]
fn a_call_that_was_cut_off_is_no_whole_one() {
    let cut = |format, text: &str, content: &str, calls: &[_]| {
        check_plan(&plan(format), text, content, calls, false)
    };
    let begun = r#"<tool_call>{"name": "get_weather", "arguments": {"city": "Os"#;
    cut(ToolFormat::Hermes, begun, "", &[("get_weather", r#"{"city": "Os"#)]);
    let second = r#"{"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "ad"#;
    cut(ToolFormat::Llama3Json, second, r#"{"name": "ad"#, &[OSLO]);
    let named = ToolPlan { named: Some("get_weather".to_owned()), ..plan(ToolFormat::Hermes) };
    check_plan(&named, r#"{"city": "Os"#, "", &[("get_weather", r#"{"city": "Os"#)], false);
    for begun in ["[", "\n[{", r#"[{"name":"get_weather","#, r#"[{"name": "get_weather", "parameters": "#] {
        cut(ToolFormat::Json, begun, "", &[]);
    }
    let second = r#"[{"name": "get_weather", "parameters": {"city": "Oslo"}}, {"name": "ad"#;
    cut(ToolFormat::Json, second, "", &[OSLO]);
}

#[test]
fn forced_answers_are_calls() {
    let required =
        r#"[{"name": "get_weather", "parameters": {"city": "Oslo"}}, {"name": "add", "parameters": {}}]"#;
    check(ToolFormat::Json, required, "", &[OSLO, ("add", "{}")]);
    let named = ToolPlan { named: Some("get_weather".to_owned()), ..plan(ToolFormat::Hermes) };
    check_plan(&named, "\n {\"city\": \"Oslo\"}\n", "", &[OSLO], true);
    check_plan(&named, "{}", "", &[("get_weather", "{}")], true);
    check_plan(&named, "", "", &[], false);
}

#[test]
fn one_call_is_enough_where_only_one_is_wanted() {
    let oslo = r#"<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>"#;
    let one = ToolPlan { parallel: false, ..plan(ToolFormat::Hermes) };
    check_plan(&one, &format!("{oslo}\n{oslo} and more"), "", &[OSLO], true);
}

#[test]
fn ids_are_of_the_family_and_unlike_each_other() {
    let check = |format: ToolFormat, length: usize| {
        let (one, other) = (format.call_id(), format.call_id());
        assert!(one != other && one.len() == length, "{one} {other}");
        assert!(one.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'));
    };
    check(ToolFormat::Hermes, 29);
    check(ToolFormat::Mistral, 9);
}

#[test]
fn arguments_come_in_pieces() {
    let (mut reader, mut parts) = (ToolReader::new(plan(ToolFormat::Hermes)), Vec::new());
    let mut kinds = Vec::new();
    for piece in ["<tool_call>{\"name\": \"get_weather\", \"arg", "uments\": {\"city\"", ": \"Os", "lo\"}}"] {
        reader.push(piece, &mut parts);
        kinds.push(std::mem::take(&mut parts));
    }
    assert_eq!(kinds[0], []);
    let arguments: Vec<_> = kinds[1..]
        .iter()
        .map(|parts| match parts.as_slice() {
            [Part::Call(call)] => (call.head.is_some(), call.arguments.as_str()),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(arguments, [(true, "{\"city\""), (false, ": \"Os"), (false, "lo\"}")]);
}
