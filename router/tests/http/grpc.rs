//! The same inference over gRPC, with a client of the real transport.

use std::time::Duration;

use serde_json::{Value, json};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1::inference_client::InferenceClient;
use thalweg_proto::v1::{InferenceRequest, ListModelsRequest};
use thalweg_router::config::RouterConfig;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::{CHAT, COMPLETIONS, Stage, chat, completion, stage_with};

/// Of the config: a free port.
fn with_grpc(config: &mut RouterConfig) {
    config.grpc.grpc = Some(([127, 0, 0, 1], 0).into());
}

async fn channel(stage: &Stage) -> Channel {
    let address = stage.router.grpc_address().expect("gRPC is served");
    Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.expect("it listens")
}

async fn client(stage: &Stage) -> InferenceClient<Channel> {
    InferenceClient::new(channel(stage).await)
}

fn request(body: &Value) -> Request<InferenceRequest> {
    Request::new(InferenceRequest { json: body.to_string().into() })
}

/// Every message up to the end.
async fn all(mut stream: Streaming<thalweg_proto::v1::InferenceResponse>) -> Result<Vec<Value>, Status> {
    let mut messages = Vec::new();
    while let Some(message) = stream.message().await? {
        messages.push(serde_json::from_slice(&message.json).expect("JSON"));
    }
    Ok(messages)
}

async fn ask_chat(stage: &Stage, request: Request<InferenceRequest>) -> Result<Vec<Value>, Status> {
    all(client(stage).await.chat(request).await?.into_inner()).await
}

fn details(status: &Status) -> Value {
    serde_json::from_slice::<Value>(status.details()).expect("JSON")["error"].clone()
}

/// Without what is new each time.
fn timeless(mut value: Value) -> Value {
    for name in ["id", "created"] {
        value.as_object_mut().unwrap().remove(name);
    }
    value
}

#[tokio::test]
async fn replies_are_those_of_http() {
    let stage = stage_with(with_grpc, true).await;
    stage.worker.says("hello\n\nyou");
    let same = async |over_http: Value, over_grpc: Result<Vec<Value>, Status>| {
        let messages = over_grpc.expect("an answer");
        assert_eq!(messages.len(), 1);
        assert_eq!(timeless(messages[0].clone()), timeless(over_http));
    };
    same(
        stage.http.post(CHAT, &chat(json!({}))).await.json(),
        ask_chat(&stage, request(&chat(json!({})))).await,
    )
    .await;
    let complete = client(&stage).await.complete(request(&completion(json!({"n": 2})))).await.unwrap();
    same(
        stage.http.post(COMPLETIONS, &completion(json!({"n": 2}))).await.json(),
        all(complete.into_inner()).await,
    )
    .await;

    let streamed = chat(json!({"stream": true, "stream_options": {"include_usage": true}, "seed": 1}));
    let chunks: Vec<_> = stage.http.post(CHAT, &streamed).await.chunks().into_iter().map(timeless).collect();
    let messages = ask_chat(&stage, request(&streamed)).await.expect("an answer");
    assert_eq!(messages.into_iter().map(timeless).collect::<Vec<_>>(), chunks);

    let models = client(&stage).await.list_models(ListModelsRequest {}).await.unwrap().into_inner();
    let models: Value = serde_json::from_slice(&models.json).unwrap();
    assert_eq!(models, stage.http.get("/v1/models").await.json());
}

#[tokio::test]
async fn errors_are_statuses_with_openais_object() {
    let stage = stage_with(with_grpc, true).await;
    let check = async |body: Value, code: Code, ours: &str, param: Value| {
        let status = ask_chat(&stage, request(&body)).await.expect_err("refused");
        assert_eq!(status.code(), code, "{status:?}");
        assert_eq!((&details(&status)["code"], &details(&status)["param"]), (&json!(ours), &param));
        assert_eq!(ErrorCode::of(&status).as_str(), ours);
    };
    check(chat(json!({"n": 0})), Code::InvalidArgument, "invalid_request", json!("n")).await;
    check(chat(json!({"model": "x"})), Code::NotFound, "model_not_found", json!("model")).await;
    let long = json!([{"role": "user", "content": "x".repeat(600)}]);
    check(chat(json!({"messages": long})), Code::OutOfRange, "context_length_exceeded", Value::Null).await;
    let status =
        ask_chat(&stage, Request::new(InferenceRequest { json: "{".into() })).await.expect_err("refused");
    assert!(status.message().contains("invalid JSON"), "{status:?}");

    let small = |config: &mut RouterConfig| {
        with_grpc(config);
        config.limits.body_bytes_max = 1000;
    };
    let small = stage_with(small, true).await;
    let status =
        ask_chat(&small, request(&chat(json!({"user": "x".repeat(1000)})))).await.expect_err("refused");
    assert_eq!(details(&status)["code"], "request_too_large");
}

#[tokio::test]
async fn a_stream_that_breaks_ends_with_a_status() {
    let stage = stage_with(
        |config| {
            with_grpc(config);
            config.limits.resumes_max = 0;
            config.limits.attempts_max = 1;
        },
        true,
    )
    .await;
    stage.worker.script(|request| {
        use futures::StreamExt;
        let begun = crate::speaking_worker::responses(request, "hello").into_iter().take(3).map(Ok);
        let broken = ErrorCode::Internal.status("it broke");
        futures::stream::iter(begun.chain(std::iter::once(Err(broken)))).boxed()
    });
    let mut stream =
        client(&stage).await.chat(request(&chat(json!({"stream": true})))).await.unwrap().into_inner();
    let mut text = String::new();
    let status = loop {
        match stream.message().await {
            Ok(Some(message)) => text.push_str(std::str::from_utf8(&message.json).unwrap()),
            Ok(None) => panic!("the stream ended as if complete: {text}"),
            Err(status) => break status,
        }
    };
    assert!(text.contains("\"content\":\"h\""), "{text}");
    assert_eq!((status.code(), &details(&status)["code"]), (Code::Internal, &json!("internal_error")));
}

#[tokio::test]
async fn ids_and_traces_come_and_go_in_metadata() {
    let stage = stage_with(with_grpc, true).await;
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let mut asked = request(&chat(json!({})));
    for (name, value) in
        [("x-request-id", "abc-1"), ("traceparent", parent), ("tracestate", "rojo=1,congo=2")]
    {
        asked.metadata_mut().insert(name, value.parse().unwrap());
    }
    let response = client(&stage).await.chat(asked).await.unwrap();
    assert_eq!(response.metadata().get("x-request-id").unwrap(), "abc-1");
    all(response.into_inner()).await.expect("an answer");
    let seen = &stage.worker.requests()[0];
    assert_eq!((seen.traceparent.as_str(), seen.tracestate.as_str()), (parent, "rojo=1,congo=2"));
}

#[tokio::test]
async fn keys_are_asked_for_where_there_are_any() {
    let file = tempfile::NamedTempFile::new().unwrap();
    // SHA-256 of `hello`.
    let hash = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
    std::fs::write(file.path(), format!("keys: [{{name: ci, sha256: {hash}, output-tokens-max: 5}}]"))
        .unwrap();
    let stage = stage_with(
        |config| {
            with_grpc(config);
            config.surface.api_keys_file = Some(file.path().to_owned());
        },
        true,
    )
    .await;
    let with_key = |key: Option<&str>, body: Value| {
        let mut request = request(&body);
        if let Some(key) = key {
            request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        }
        request
    };
    for key in [None, Some("wrong")] {
        let status = ask_chat(&stage, with_key(key, chat(json!({})))).await.expect_err("refused");
        assert_eq!(
            (status.code(), &details(&status)["code"]),
            (Code::Unauthenticated, &json!("invalid_api_key"))
        );
    }
    let status = client(&stage).await.list_models(ListModelsRequest {}).await.expect_err("refused");
    assert_eq!(status.code(), Code::Unauthenticated);
    let answer = ask_chat(&stage, with_key(Some("hello"), chat(json!({"max_tokens": 5})))).await;
    assert_eq!(answer.expect("let in").len(), 1);
    let status =
        ask_chat(&stage, with_key(Some("hello"), chat(json!({})))).await.expect_err("over the key's limit");
    assert_eq!(details(&status)["param"], "max_tokens");
    // As a load balancer asks.
    assert_eq!(health(&stage).await, ServingStatus::Serving);
}

async fn health(stage: &Stage) -> ServingStatus {
    let service = "thalweg.v1.Inference".to_owned();
    let answer = HealthClient::new(channel(stage).await).check(HealthCheckRequest { service }).await;
    answer.expect("health is told").into_inner().status()
}

#[tokio::test]
async fn a_caller_that_goes_away_frees_the_worker() {
    let stage = stage_with(with_grpc, true).await;
    stage.worker.script(|request| {
        use futures::StreamExt;
        let begun = crate::speaking_worker::responses(request, "hello").into_iter().take(3).map(Ok);
        futures::stream::iter(begun).chain(futures::stream::pending()).boxed()
    });
    let mut streamed =
        client(&stage).await.chat(request(&chat(json!({"stream": true})))).await.unwrap().into_inner();
    streamed.message().await.unwrap().expect("a first chunk");
    drop(streamed);
    stage.worker.ended(1).await;
    // Also one that waits for a whole reply.
    let mut whole = client(&stage).await;
    let asked = chat(json!({}));
    let waiting = tokio::spawn(async move { all(whole.chat(request(&asked)).await?.into_inner()).await });
    stage.worker.begun(2).await;
    waiting.abort();
    stage.worker.ended(2).await;
}

#[tokio::test]
async fn a_callers_deadline_is_kept() {
    let stage = stage_with(with_grpc, true).await;
    stage.worker.script(|_| {
        use futures::StreamExt;
        futures::stream::pending().boxed()
    });
    let mut asked = request(&chat(json!({})));
    asked.metadata_mut().insert("grpc-timeout", "300m".parse().unwrap());
    let status = ask_chat(&stage, asked).await.expect_err("too late");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    stage.worker.ended(1).await;
}

#[tokio::test]
async fn what_runs_is_finished_when_the_router_drains() {
    let stage = stage_with(with_grpc, true).await;
    let (go, gone) = tokio::sync::watch::channel(false);
    stage.worker.script(move |request| {
        use futures::StreamExt;
        let mut gone = gone.clone();
        let rest =
            crate::speaking_worker::responses(request, "hello").into_iter().map(Ok).collect::<Vec<_>>();
        let wait = async move {
            gone.wait_for(|go| *go).await.expect("the test goes on");
            futures::stream::iter(rest)
        };
        futures::stream::once(wait).flatten().boxed()
    });
    let mut running = client(&stage).await;
    let asked = chat(json!({"stream": true}));
    let answer = tokio::spawn(async move { all(running.chat(request(&asked)).await?.into_inner()).await });
    stage.worker.begun(1).await;
    let address = stage.router.grpc_address().unwrap();
    let (router, worker) = (stage.router, stage.worker);
    let ended = tokio::spawn(router.shutdown());
    // Nobody new comes in; what runs is not hurried.
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    while endpoint.connect().await.is_ok() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!ended.is_finished() && !answer.is_finished());
    go.send(true).unwrap();
    let chunks = answer.await.unwrap().expect("a whole answer");
    let text: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "hello");
    ended.await.unwrap();
    drop(worker);
}

#[tokio::test]
async fn strangers_of_other_hosts_are_not_let_in_by_default() {
    use std::sync::Arc;
    use thalweg_cache_index::MemoryIndex;
    use thalweg_membership::StaticMembership;
    use thalweg_router::router::Router;

    let start = async |insecure: bool| {
        let mut config = RouterConfig { http: ([127, 0, 0, 1], 0).into(), ..RouterConfig::default() };
        config.grpc.grpc = Some(([0, 0, 0, 0], 0).into());
        config.grpc.insecure = insecure;
        Router::start(config, Arc::new(StaticMembership::new([])), Arc::new(MemoryIndex::new())).await
    };
    let refused = start(false).await.err().expect("refused").to_string();
    assert!(refused.starts_with("--grpc") && refused.contains("--insecure"), "{refused}");
    assert!(start(true).await.is_ok());
}

#[tokio::test]
async fn reflection_lists_what_is_served() {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

    let stage = stage_with(with_grpc, true).await;
    let question = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut client = ServerReflectionClient::new(channel(&stage).await);
    let answers = client.server_reflection_info(futures::stream::iter([question])).await.unwrap();
    let answer = answers.into_inner().message().await.unwrap().and_then(|answer| answer.message_response);
    let Some(MessageResponse::ListServicesResponse(list)) = answer else { panic!("no list: {answer:?}") };
    let mut names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        ["grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "thalweg.v1.Inference"]
    );
}
