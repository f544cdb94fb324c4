//! Values by name: written, lapsing, and out of reach for no longer than Redis is.

use std::time::Duration;

use thalweg_cache_index::RedisConfig;
use thalweg_cache_index::redis::values::RedisValues;
use thalweg_harness::redis::Redis;

const LIFE: Duration = Duration::from_secs(60);
const BYTES_MAX: usize = 1 << 20;

fn values(url: &str) -> RedisValues {
    RedisValues::new(RedisConfig::new(url.parse().expect("a URL")))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_is_found_until_it_is_deleted() {
    let redis = Redis::start();
    let values = values(&redis.url());
    assert!(values.get("a", BYTES_MAX).await.expect("an answer").is_none());
    values.set("a", b"one\0two", LIFE).await.expect("written");
    assert_eq!(values.get("a", BYTES_MAX).await.expect("an answer").as_deref(), Some(&b"one\0two"[..]));
    let ttl = redis.command(&["TTL", "{tw1:a}"]);
    assert!([":60\r\n", ":59\r\n", ":58\r\n"].contains(&&*ttl), "{ttl}");
    assert!(values.delete("a").await.expect("an answer") && !values.delete("a").await.expect("an answer"));
}

#[tokio::test(flavor = "multi_thread")]
async fn it_recovers_while_it_is_asked_on_and_on() {
    let mut redis = Redis::start();
    let values = values(&redis.url());
    values.set("a", b"1", LIFE).await.expect("written");
    let fails = async || values.get("a", BYTES_MAX).await.expect_err("out of reach");
    let recovers = async || {
        // Not one request waits for the end of a pause, and none makes it longer.
        let asked = async {
            while values.get("a", BYTES_MAX).await.is_err() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), asked).await.expect("it recovers");
    };
    redis.freeze();
    fails().await;
    fails().await;
    redis.thaw();
    recovers().await;
    redis.kill();
    fails().await;
    redis.restart_empty();
    recovers().await;
    assert!(values.get("a", BYTES_MAX).await.expect("an answer").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_another_kind_costs_no_connection() {
    let redis = Redis::start();
    let values = values(&redis.url());
    values.set("a", b"1", LIFE).await.expect("written");
    redis.command(&["LPUSH", "{tw1:list}", "x"]);
    values.get("list", BYTES_MAX).await.expect_err("no string");
    assert!(values.get("a", BYTES_MAX).await.expect("an answer").is_some());
}
