//! The API's own description is true.

use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::{CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, Stage, chat, completion, stage};

/// Where the routes are written down.
const ROUTES: &str = include_str!("../../src/api/mod.rs");

async fn document(stage: &Stage) -> Value {
    let reply = stage.http.get("/openapi.json").await;
    assert_eq!(reply.header("content-type"), Some("application/json"));
    reply.json()
}

/// Why a value is not what a schema says: the keywords that the document uses, strictly for its own property names.
fn fault(document: &Value, schema: &Value, value: &Value, path: &str) -> Option<String> {
    if let Some(target) = schema["$ref"].as_str() {
        let target = document.pointer(&target[1..]).unwrap_or_else(|| panic!("{target} is not there"));
        return fault(document, target, value, path);
    }
    if let Some(several) = schema["anyOf"].as_array() {
        let faults: Vec<_> = several.iter().map(|s| fault(document, s, value, path)).collect();
        return faults.iter().all(Option::is_some).then(|| format!("{path}: {faults:?}"));
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
        _ => vec![kind],
    };
    let is_const = schema.get("const").is_none_or(|c| c == value);
    let is_listed = schema["enum"].as_array().is_none_or(|values| values.contains(value));
    if !kinds.contains(&kind) || !is_const || !is_listed {
        return Some(format!("{path} is {value}, not {schema}"));
    }
    if let Some(missing) = schema["required"].as_array().and_then(|names| {
        names.iter().filter_map(Value::as_str).find(|name| value.is_object() && value.get(name).is_none())
    }) {
        return Some(format!("{path}.{missing} is missing"));
    }
    let items = value.as_array().into_iter().flatten().enumerate();
    let mut faults =
        items.filter_map(|(at, item)| fault(document, &schema["items"], item, &format!("{path}[{at}]")));
    if let Some(first) = faults.next() {
        return Some(first);
    }
    let properties = schema["properties"].as_object()?;
    value.as_object().into_iter().flatten().find_map(|(name, value)| {
        let path = format!("{path}.{name}");
        match properties.get(name) {
            Some(schema) => fault(document, schema, value, &path),
            None => Some(format!("{path} is not described")),
        }
    })
}

#[tokio::test]
async fn the_document_names_every_route_and_no_other() {
    let stage = stage().await;
    let document = document(&stage).await;
    assert_eq!(document["openapi"], "3.1.0");
    let mut routes: Vec<String> = ROUTES
        .lines()
        .filter_map(|line| line.trim().strip_prefix(".route(\""))
        .map(|rest| rest.split('"').next().unwrap().replace("{*id}", "{id}"))
        .collect();
    let mut paths: Vec<_> = document["paths"].as_object().unwrap().keys().cloned().collect();
    routes.sort();
    paths.sort();
    assert_eq!(paths, routes);

    for (path, operations) in document["paths"].as_object().unwrap() {
        let path = path.replace("{id}", "tiny");
        for method in [Method::GET, Method::POST, Method::DELETE] {
            let reply = stage.http.send(method.clone(), &path, &[], Bytes::from("{}")).await.read().await;
            let is_described = operations.get(method.as_str().to_lowercase()).is_some();
            assert_eq!(reply.status != StatusCode::METHOD_NOT_ALLOWED, is_described, "{method} {path}");
            let is_route = reply.status != StatusCode::NOT_FOUND || reply.error()["code"] != "not_found";
            assert!(is_route, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn replies_are_what_the_document_says() {
    let stage = stage().await;
    let document = document(&stage).await;
    let check = |schema: &str, value: &Value| {
        let schema = &document["components"]["schemas"][schema];
        assert_eq!(fault(&document, schema, value, ""), None, "{value}");
    };
    stage.worker.says("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call> and");
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let wishes = [
        json!({}),
        json!({"tools": tools}),
        json!({"logprobs": true, "top_logprobs": 2, "return_token_ids": true, "stop": "and", "n": 2}),
    ];
    for wish in wishes {
        let mut body = chat(wish);
        check("ChatRequest", &body);
        check("ChatReply", &stage.http.post(CHAT, &body).await.json());
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        for chunk in stage.http.post(CHAT, &body).await.chunks() {
            let mut chunk = chunk;
            // Of the first chunk alone, as vLLM has it.
            chunk.as_object_mut().unwrap().remove("prompt_token_ids");
            check("ChatChunk", &chunk);
        }
    }
    for wish in [json!({}), json!({"logprobs": 2, "echo": true, "return_token_ids": true})] {
        let mut body = completion(wish);
        check("CompletionRequest", &body);
        check("CompletionReply", &stage.http.post(COMPLETIONS, &body).await.json());
        body["stream"] = json!(true);
        stage
            .http
            .post(COMPLETIONS, &body)
            .await
            .chunks()
            .iter()
            .for_each(|chunk| check("CompletionReply", chunk));
    }
    stage.worker.script(crate::speaking_worker::embed);
    for wish in
        [json!({}), json!({"encoding_format": "base64", "dimensions": 2, "truncate_prompt_tokens": 5})]
    {
        let mut body = json!({"model": "tiny", "input": ["a", "b"]});
        wish.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        check("EmbeddingRequest", &body);
        check("EmbeddingReply", &stage.http.post(EMBEDDINGS, &body).await.json());
    }
    stage.worker.says("ok");
    let wishes = [
        json!({}),
        json!({"tools": [{"type": "function", "name": "f"}], "instructions": "i", "metadata": {"a": "b"}}),
        json!({"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 2}),
    ];
    for wish in wishes {
        let mut body = json!({"model": "tiny", "input": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(wish.as_object().unwrap().clone());
        check("ResponseRequest", &body);
        let reply = stage.http.post(RESPONSES, &body).await.json();
        check("Response", &reply);
        let path = format!("{RESPONSES}/{}", reply["id"].as_str().unwrap());
        check("Response", &stage.http.get(&path).await.json());
        check("ItemList", &stage.http.get(&format!("{path}/input_items")).await.json());
        let deleted = stage.http.send(Method::DELETE, &path, &[], Bytes::new()).await.read().await.json();
        check("Deleted", &deleted);
    }
    check("Model", &stage.http.get("/v1/models/tiny").await.json());
    check("TokenizerInfo", &stage.http.get("/tokenizer_info").await.json());
    check("Ready", &stage.http.get("/ready").await.json());
    check("Error", &stage.http.post(CHAT, &json!({})).await.json());
    check("Error", &stage.http.get("/nowhere").await.json());
}
