//! Kept responses: found at every router through Redis, by their tenant alone, and no answer is lost when Redis is.

use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use thalweg_harness::fleet::eventually;
use thalweg_harness::redis::Redis;
use thalweg_harness::{Etcd, Fleet, FleetPlan, HttpClient, Reply};

use crate::support::{STEADY, sim};

const RESPONSES: &str = "/v1/responses";
/// Tokens of an answer: a few.
const TOKENS: usize = 5;

fn body(fields: Value) -> Value {
    let mut body = json!({"model": "llama3", "input": "a", "max_output_tokens": TOKENS, "ignore_eos": true});
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// A request with a key.
async fn send(http: &HttpClient, key: &str, method: Method, path: &str, body: &Value) -> Reply {
    let headers = [("authorization", &*format!("Bearer {key}")), ("content-type", "application/json")];
    http.send(method, path, &headers, Bytes::from(body.to_string())).await.read().await
}

fn id_of(reply: &Reply) -> String {
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.text);
    reply.json()["id"].as_str().expect("an id").to_owned()
}

fn with_redis(redis: &Redis) -> FleetPlan {
    sim(STEADY).workers(1).args(&["--index", &redis.url()])
}

async fn not_kept(fleet: &Fleet, reason: &str) -> f64 {
    let label = format!("reason=\"{reason}\"");
    fleet.router_metrics(0).await.count("thalweg_router_responses_not_kept_total", &label)
}

/// A response of one router is continued, read and deleted at another; its key lapses; no other tenant sees it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_goes_on_at_another_router() {
    let redis = Redis::start();
    let keys = tempfile::NamedTempFile::new().expect("a file");
    // SHA-256 of `hello` and of `world`.
    let hashes = [
        ("2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824", "one"),
        ("486ea46224d1bb4fb680f34f7c9ad96a8f24ec88be73ea8e5a6c65260e9cb8a7", "two"),
    ];
    let list = hashes.map(|(hash, tenant)| json!({"name": tenant, "sha256": hash, "tenant": tenant}));
    std::fs::write(keys.path(), json!({"keys": list}).to_string()).expect("written");
    let path = keys.path().to_str().expect("UTF-8");
    let flags = ["--response-ttl", "600", "--metrics-public", "--api-keys-file", path];
    let fleet = with_redis(&redis).routers(2).router_args(&flags).start().await;
    let [first, second] = [&fleet.routers[0].http, &fleet.routers[1].http];

    let begun = send(first, "hello", Method::POST, RESPONSES, &body(json!({}))).await;
    let id = id_of(&begun);
    assert_eq!(begun.json()["store"], true);
    let goes_on = body(json!({"previous_response_id": id, "input": "b"}));
    let next = send(second, "hello", Method::POST, RESPONSES, &goes_on).await;
    let tokens = |reply: &Reply| reply.json()["usage"]["input_tokens"].as_u64().expect("a count");
    id_of(&next);
    assert!(tokens(&next) > tokens(&begun), "the conversation is before it");

    let path = format!("{RESPONSES}/{id}");
    assert_eq!(send(second, "hello", Method::GET, &path, &Value::Null).await.json(), begun.json());
    let own = send(second, "hello", Method::GET, &format!("{RESPONSES}/resp_0"), &Value::Null).await;
    for (method, path) in [
        (Method::GET, path.clone()),
        (Method::DELETE, path.clone()),
        (Method::GET, format!("{path}/input_items")),
    ] {
        let foreign = send(second, "world", method, &path, &Value::Null).await;
        assert_eq!((foreign.status, &foreign.error()["code"]), (StatusCode::NOT_FOUND, &own.error()["code"]));
    }
    let foreign = send(second, "world", Method::POST, RESPONSES, &goes_on).await;
    assert_eq!(
        (foreign.status, &foreign.error()["param"]),
        (StatusCode::NOT_FOUND, &json!("previous_response_id"))
    );

    let lapse = "local left = {} for _, key in ipairs(redis.call('KEYS', '{tw1:response:*')) do \
                 local ttl = redis.call('TTL', key) left[#left + 1] = (ttl > 0 and ttl <= 600) and 1 or 0 end return left";
    assert_eq!(redis.command(&["EVAL", lapse, "0"]), "*2\r\n:1\r\n:1\r\n");

    assert_eq!(send(second, "hello", Method::DELETE, &path, &Value::Null).await.json()["deleted"], true);
    assert_eq!(send(first, "hello", Method::GET, &path, &Value::Null).await.status, StatusCode::NOT_FOUND);
    fleet.finish().await;
}

/// Redis frozen, killed and back: every answer comes and says that it was not kept, what is to be read is refused with
/// 503 meanwhile, and all is well again without a restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_in_trouble_loses_no_answer() {
    let mut redis = Redis::start();
    let fleet = with_redis(&redis).start().await;
    let http = fleet.http();
    let id = id_of(&http.post(RESPONSES, &body(json!({}))).await);
    let path = format!("{RESPONSES}/{id}");
    let in_trouble = async |what: &str| {
        let before = not_kept(&fleet, "store_failed").await;
        let whole = http.post(RESPONSES, &body(json!({}))).await;
        id_of(&whole);
        assert_eq!(
            (&whole.json()["status"], &whole.json()["store"]),
            (&json!("incomplete"), &json!(false)),
            "{what}"
        );
        let streamed = http.post(RESPONSES, &body(json!({"stream": true}))).await;
        assert!(streamed.text.contains("event: response.incomplete"), "{what}: {}", streamed.text);
        assert_eq!(not_kept(&fleet, "store_failed").await, before + 2.0, "{what}");
        for reply in [
            http.get(&path).await,
            http.get(&format!("{path}/input_items")).await,
            http.post(RESPONSES, &body(json!({"previous_response_id": id}))).await,
        ] {
            assert_eq!(
                (reply.status, reply.header("retry-after")),
                (StatusCode::SERVICE_UNAVAILABLE, Some("1")),
                "{what}"
            );
        }
    };
    redis.freeze();
    in_trouble("frozen").await;
    redis.thaw();
    eventually("it is read again", async || http.get(&path).await.status == StatusCode::OK).await;
    redis.kill();
    in_trouble("killed").await;
    redis.restart_empty();
    let is_kept = async || http.post(RESPONSES, &body(json!({}))).await.json()["store"] == true;
    eventually("responses are kept again", is_kept).await;
    assert_eq!(http.get(&path).await.status, StatusCode::NOT_FOUND, "it went with the data");
    fleet.finish().await;
}

/// What is over the cap is answered and not kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_over_the_cap_is_not_kept() {
    let redis = Redis::start();
    let fleet = with_redis(&redis).router_args(&["--response-bytes-max", "2000"]).start().await;
    let small = fleet.http().post(RESPONSES, &body(json!({}))).await;
    assert_eq!(small.json()["store"], true, "{}", small.text);
    let large = fleet
        .http()
        .post(RESPONSES, &body(json!({"metadata": {"a": "x".repeat(500), "b": "x".repeat(500)}})))
        .await;
    assert_eq!(large.json()["store"], false, "{}", large.text);
    assert_eq!(not_kept(&fleet, "too_large").await, 1.0);
    let id = id_of(&large);
    assert_eq!(fleet.http().get(&format!("{RESPONSES}/{id}")).await.status, StatusCode::NOT_FOUND);
    fleet.finish().await;
}

/// Several routers that have no Redis say so rather than lose conversations by chance; answers are given all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_routers_without_redis_keep_nothing() {
    let etcd = Etcd::start();
    let fleet =
        sim(STEADY).workers(1).routers(2).args(&["--membership", &etcd.url("/responses")]).start().await;
    let http = fleet.http();
    let knows_the_other = async || http.post(RESPONSES, &body(json!({}))).await.json()["store"] == false;
    eventually("the routers know each other", knows_the_other).await;
    for (field, value) in [("store", json!(true)), ("previous_response_id", json!("resp_1"))] {
        let refused = http.post(RESPONSES, &body(json!({field: value}))).await;
        assert_eq!((refused.status, &refused.error()["param"]), (StatusCode::BAD_REQUEST, &json!(field)));
        assert!(
            refused.text.contains("2 routers") && refused.text.contains("--index redis://"),
            "{}",
            refused.text
        );
    }
    fleet.finish().await;
}
