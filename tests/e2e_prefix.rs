//! Conversations stay with the worker that holds their prefix, and the workers share the load.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;

use futures::future::join_all;
use serde_json::{Value, json};
use thalweg_harness::{Cluster, Random, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
const CONVERSATIONS: usize = 20;
const TURNS: usize = 5;
const IN_FLIGHT: usize = 8;
const BLOCK_TOKENS: u64 = 16;
/// Short on purpose: the less there is to recompute, the more tempting is the other worker.
const OPENING_WORDS: usize = 30;
const QUESTION_WORDS: usize = 12;
const WORDS: [&str; 12] = [
    "river", "stone", "bread", "clock", "bird", "bridge", "green", "quiet", "morning", "letter", "window",
    "garden",
];

struct Conversation {
    questions: VecDeque<String>,
    messages: Vec<Value>,
    turns: Vec<Turn>,
}

struct Turn {
    worker: String,
    prompt_tokens: u64,
    cached_tokens: u64,
}

#[tokio::test]
async fn follow_up_turns_go_where_their_prefix_is() {
    let mut random = Random::from_env(5);
    let conversations = (0..CONVERSATIONS).map(|number| Conversation::new(number, &mut random));
    let waiting: Mutex<VecDeque<_>> = Mutex::new(conversations.collect());
    let finished = Mutex::new(VecDeque::new());
    let cluster = Cluster::up(BINARY, &models::smollm2(), 2, &["--kv-cache-memory-bytes", "256MiB"]);
    let client = async |_| {
        while let Some(mut conversation) = next(&waiting) {
            turn(&cluster, &mut conversation).await;
            let list = if conversation.questions.is_empty() { &finished } else { &waiting };
            list.lock().expect("unpoisoned").push_back(conversation);
        }
    };
    join_all((0..IN_FLIGHT).map(client)).await;
    let finished = finished.into_inner().expect("unpoisoned");
    check(&finished);
    // prefix-cache-01: what clients were told is what workers found, but for attempts that were given up on a busy machine.
    let told: u64 = finished.iter().flat_map(|one| &one.turns).map(|turn| turn.cached_tokens).sum();
    let mut found = 0.0;
    for worker in &cluster.worker_metrics {
        let scrape = thalweg_harness::Scrape::parse(&worker.get("/metrics").await.text);
        found += scrape.value("vllm:prefix_cache_hits_total");
    }
    let metrics = cluster.metrics().await;
    let given_up: f64 = ["retries", "resumes"]
        .map(|name| metrics.count(&format!("thalweg_router_{name}_total"), ""))
        .iter()
        .sum();
    assert!(told as f64 == found || (given_up > 0.0 && told as f64 <= found), "told {told}, found {found}");
    cluster.stop();
}

impl Conversation {
    fn new(number: usize, random: &mut Random) -> Self {
        let mut text = |words| {
            let words = (0..words).map(|_| WORDS[random.below(WORDS.len())]);
            format!("Text {number}: {}", words.collect::<Vec<_>>().join(" "))
        };
        let questions = (0..TURNS).map(|turn| text(if turn == 0 { OPENING_WORDS } else { QUESTION_WORDS }));
        Self { questions: questions.collect(), messages: Vec::new(), turns: Vec::new() }
    }
}

fn next(waiting: &Mutex<VecDeque<Conversation>>) -> Option<Conversation> {
    waiting.lock().expect("unpoisoned").pop_front()
}

async fn turn(cluster: &Cluster, conversation: &mut Conversation) {
    let question = conversation.questions.pop_front().expect("a turn is left");
    conversation.messages.push(json!({"role": "user", "content": question}));
    let body =
        json!({"model": cluster.model, "messages": conversation.messages, "temperature": 0, "max_tokens": 4});
    let reply = cluster.http.post("/v1/chat/completions", &body).await;
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text);
    let worker = reply.header("x-thalweg-worker").expect("the worker is named").to_owned();
    let json = reply.json();
    conversation.messages.push(json["choices"][0]["message"].clone());
    let usage = &json["usage"];
    conversation.turns.push(Turn {
        worker,
        prompt_tokens: usage["prompt_tokens"].as_u64().expect("a count"),
        cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count"),
    });
}

fn check(conversations: &VecDeque<Conversation>) {
    assert_eq!(conversations.len(), CONVERSATIONS);
    let mut per_worker = BTreeMap::<&str, usize>::new();
    let (mut follow_ups, mut at_prefix) = (0, 0);
    for conversation in conversations {
        for turn in &conversation.turns {
            *per_worker.entry(&turn.worker).or_default() += 1;
        }
        for pair in conversation.turns.windows(2) {
            follow_ups += 1;
            if pair[0].worker == pair[1].worker {
                at_prefix += 1;
                let held = pair[0].prompt_tokens / BLOCK_TOKENS * BLOCK_TOKENS;
                let cached = pair[1].cached_tokens;
                assert!(cached >= held, "{cached} tokens cached where the turn before left {held}");
            }
        }
    }
    assert_eq!(follow_ups, CONVERSATIONS * (TURNS - 1));
    assert!(
        at_prefix * 100 >= follow_ups * 95,
        "{at_prefix} of {follow_ups} follow-up turns went to the prefix"
    );
    let most = per_worker.values().max().copied().unwrap_or_default();
    assert!(most * 100 <= CONVERSATIONS * TURNS * 65, "one worker got too many: {per_worker:?}");
    eprintln!(
        "{at_prefix} of {follow_ups} follow-up turns went to the prefix; requests per worker: {per_worker:?}"
    );
}
