//! Clients that write down what happens to them instead of failing: what a stream said, when, and how it ended.

use std::ops::RangeBounds;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use http::{HeaderMap, Method};
use serde_json::Value;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::http::{EventStream, HttpClient};

/// No request of these tests takes so long; one that does hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// Shortest time before a refused client tries again, and twice it the longest; SDKs wait longer. Without it the clients alone
/// would take both cores, and if it were always the same they would come in waves.
const REFUSED_PAUSE: Duration = Duration::from_millis(60);

/// What became of one request.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Status line; 0 where there was no answer.
    pub status: u16,
    /// All headers.
    pub headers: HeaderMap,
    /// By index.
    pub choices: Vec<Choice>,
    /// The usage record, if one came.
    pub usage: Option<Value>,
    /// The error object of the body or of an event, or how the connection broke.
    pub error: Option<String>,
    /// A stream said `[DONE]`, or a body was read to its end.
    pub done: bool,
    /// From the request to the first token, or to the end of a body.
    pub first: Duration,
    /// When each event with tokens came.
    pub arrivals: Vec<Instant>,
    /// From the request to its end.
    pub took: Duration,
    /// When that was.
    pub ended: Option<Instant>,
}

/// What one choice said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// Its text.
    pub text: String,
    /// With `return_token_ids`.
    pub token_ids: Vec<u64>,
    /// With `logprobs`.
    pub logprobs: Vec<f64>,
    /// Why it ended; empty until then.
    pub finish_reason: String,
    /// The stop string or token that ended it.
    pub stop_reason: Value,
}

/// A request on its way.
pub struct Running {
    tokens: Arc<AtomicUsize>,
    task: JoinHandle<Outcome>,
}

/// Clients that ask again and again until they are told to stop.
pub struct Load {
    stop: Arc<AtomicBool>,
    ended: Arc<AtomicUsize>,
    clients: Vec<JoinHandle<Vec<Outcome>>>,
}

impl Outcome {
    /// What a client would complain of: anything but a whole answer.
    pub fn failure(&self) -> Option<String> {
        let whole = self.status == 200
            && self.error.is_none()
            && self.done
            && !self.choices.is_empty()
            && self.choices.iter().all(|choice| !choice.finish_reason.is_empty());
        (!whole).then(|| format!("status {}, {:?}, done: {}", self.status, self.error, self.done))
    }

    /// What must not depend on what happened to workers: choices, prompt tokens, completion tokens.
    pub fn answer(&self) -> (&[Choice], u64, u64) {
        (&self.choices, self.used("prompt_tokens"), self.used("completion_tokens"))
    }

    /// A figure of the usage record.
    pub fn used(&self, name: &str) -> u64 {
        self.usage.as_ref().and_then(|usage| usage[name].as_u64()).unwrap_or_default()
    }

    /// Prompt tokens that were found in a cache.
    pub fn cached_tokens(&self) -> u64 {
        let details = self.usage.as_ref().map(|usage| &usage["prompt_tokens_details"]["cached_tokens"]);
        details.and_then(Value::as_u64).unwrap_or_default()
    }

    /// Longest time between two events with tokens.
    pub fn gap_max(&self) -> Duration {
        self.gaps(..).max().unwrap_or_default()
    }

    /// Times between two events with tokens, of those that the later one ended within a span of time.
    pub fn gaps(&self, ended: impl RangeBounds<Instant>) -> impl Iterator<Item = Duration> {
        let pairs = self.arrivals.iter().zip(self.arrivals.iter().skip(1));
        pairs.filter(move |(_, later)| ended.contains(later)).map(|(earlier, later)| *later - *earlier)
    }

    /// A header, empty if there is none.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

/// The value at a quantile.
pub fn quantile(of: impl IntoIterator<Item = Duration>, quantile: f64) -> Duration {
    let mut of: Vec<_> = of.into_iter().collect();
    of.sort();
    let at = (of.len() as f64 * quantile).ceil() as usize;
    of.get(at.saturating_sub(1)).copied().unwrap_or_default()
}

/// Panics unless every answer is whole; tells how many are not, and some of them.
pub fn assert_no_failures<'a>(what: &str, outcomes: impl IntoIterator<Item = &'a Outcome>) {
    let all: Vec<_> = outcomes.into_iter().map(Outcome::failure).collect();
    let failures: Vec<_> = all.iter().flatten().collect();
    eprintln!("{what}: {} of {} requests failed", failures.len(), all.len());
    let some: Vec<_> = failures.iter().take(5).collect();
    assert!(failures.is_empty(), "{what}: {} of {} requests failed: {some:#?}", failures.len(), all.len());
}

impl Running {
    /// Sends a request, whose body says whether it is a stream, to a path.
    pub fn start(client: &HttpClient, path: &'static str, body: Value) -> Self {
        let tokens = Arc::<AtomicUsize>::default();
        let (client, counter) = (client.clone(), Arc::clone(&tokens));
        Self { tokens, task: tokio::spawn(async move { ask(&client, path, &body, &counter).await }) }
    }

    /// Tokens that have come so far, over all choices.
    pub fn tokens(&self) -> usize {
        self.tokens.load(Ordering::Relaxed)
    }

    /// Whether it has ended.
    pub fn is_over(&self) -> bool {
        self.task.is_finished()
    }

    /// How it ended.
    pub async fn outcome(self) -> Outcome {
        self.task.await.expect("clients do not panic")
    }

    /// How all of them ended, in order.
    pub async fn outcomes(all: impl IntoIterator<Item = Self>) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for running in all {
            outcomes.push(running.outcome().await);
        }
        outcomes
    }
}

impl Load {
    /// So many clients, each of which asks one of the routers in turn; `body` is given a number that is new each time.
    pub fn start(
        clients: usize,
        routers: &[&HttpClient],
        path: &'static str,
        body: impl Fn(usize) -> Value + Send + Sync + 'static,
    ) -> Self {
        let (stop, ended) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let (body, number) = (Arc::new(body), Arc::<AtomicUsize>::default());
        let client = |i: usize| {
            let router = routers[i % routers.len()].clone();
            let (stop, ended) = (Arc::clone(&stop), Arc::clone(&ended));
            let (body, number) = (Arc::clone(&body), Arc::clone(&number));
            tokio::spawn(async move {
                let (mut outcomes, tokens) = (Vec::new(), AtomicUsize::default());
                while !stop.load(Ordering::Relaxed) {
                    let number = number.fetch_add(1, Ordering::Relaxed);
                    let body = body(number);
                    let outcome = ask(&router, path, &body, &tokens).await;
                    let refused = outcome.status == 429;
                    outcomes.push(outcome);
                    ended.fetch_add(1, Ordering::Relaxed);
                    if refused {
                        tokio::time::sleep(REFUSED_PAUSE + REFUSED_PAUSE * (number % 64) as u32 / 64).await;
                    }
                }
                outcomes
            })
        };
        let clients = (0..clients).map(client).collect();
        Self { stop, ended, clients }
    }

    /// Answers so far.
    pub fn ended(&self) -> usize {
        self.ended.load(Ordering::Relaxed)
    }

    /// Waits until so many more answers have come.
    pub async fn goes_on(&self, answers: usize) {
        let until = self.ended() + answers;
        crate::fleet::eventually("answers under load", async || self.ended() >= until).await;
    }

    /// Lets every client finish what it asked; all their outcomes.
    pub async fn stop(self) -> Vec<Outcome> {
        self.stop.store(true, Ordering::Relaxed);
        let mut outcomes = Vec::new();
        for client in self.clients {
            outcomes.extend(client.await.expect("clients do not panic"));
        }
        outcomes
    }
}

/// Asks and reads to the end; counts tokens as they come.
async fn ask(client: &HttpClient, path: &str, body: &Value, tokens: &AtomicUsize) -> Outcome {
    let start = Instant::now();
    let headers = [("content-type", "application/json")];
    let mut outcome = Outcome::default();
    match client.try_send(Method::POST, path, &headers, body.to_string().into()).await {
        Err(error) => outcome.error = Some(error),
        Ok(reply) => {
            outcome.status = reply.status.as_u16();
            outcome.headers = reply.headers.clone();
            let is_stream = outcome.header("content-type").starts_with("text/event-stream");
            let read = async {
                if is_stream {
                    read_events(reply, start, tokens, &mut outcome).await
                } else {
                    read_body(reply, start, tokens, &mut outcome).await
                }
            };
            let read = timeout(PATIENCE, read).await;
            let read = read.unwrap_or_else(|_| Err(format!("no end within {PATIENCE:?}")));
            outcome.error = outcome.error.take().or(read.err());
        }
    }
    let end = Instant::now();
    (outcome.took, outcome.ended) = (end - start, Some(end));
    outcome
}

async fn read_body(
    reply: EventStream,
    start: Instant,
    tokens: &AtomicUsize,
    outcome: &mut Outcome,
) -> Result<(), String> {
    let text = reply.try_read().await?.text;
    outcome.first = start.elapsed();
    let body: Value = serde_json::from_str(&text).map_err(|error| format!("{error} in {text:?}"))?;
    tokens.fetch_add(outcome.take(&body), Ordering::Relaxed);
    outcome.done = true;
    Ok(())
}

async fn read_events(
    mut reply: EventStream,
    start: Instant,
    tokens: &AtomicUsize,
    outcome: &mut Outcome,
) -> Result<(), String> {
    while let Some(event) = reply.try_next().await? {
        let Some(data) = event.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            outcome.done = true;
            continue;
        }
        let chunk: Value = serde_json::from_str(data).map_err(|error| format!("{error} in {data:?}"))?;
        let new = outcome.take(&chunk);
        if new > 0 {
            let now = Instant::now();
            if outcome.arrivals.is_empty() {
                outcome.first = now - start;
            }
            outcome.arrivals.push(now);
            tokens.fetch_add(new, Ordering::Relaxed);
        }
    }
    Ok(())
}

impl Outcome {
    /// Takes in a chunk or a whole body; the number of tokens in it.
    fn take(&mut self, json: &Value) -> usize {
        if json["error"].is_object() {
            self.error = Some(json["error"].to_string());
        }
        if json["usage"].is_object() {
            self.usage = Some(json["usage"].clone());
        }
        let choices = json["choices"].as_array();
        choices.into_iter().flatten().map(|choice| self.take_choice(choice)).sum()
    }

    fn take_choice(&mut self, json: &Value) -> usize {
        let index = json["index"].as_u64().unwrap_or_default() as usize;
        if self.choices.len() <= index {
            self.choices.resize(index + 1, Choice::default());
        }
        let choice = &mut self.choices[index];
        let texts = [&json["text"], &json["delta"]["content"], &json["message"]["content"]];
        let text: String = texts.into_iter().filter_map(Value::as_str).collect();
        let ids = json["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        let before = choice.token_ids.len();
        choice.token_ids.extend(ids);
        choice.logprobs.extend(logprobs(&json["logprobs"]));
        choice.finish_reason.push_str(json["finish_reason"].as_str().unwrap_or_default());
        if !json["stop_reason"].is_null() {
            choice.stop_reason = json["stop_reason"].clone();
        }
        let new = (choice.token_ids.len() - before).max(usize::from(!text.is_empty()));
        choice.text += &text;
        new
    }
}

/// Of a completion, or of a chat.
fn logprobs(json: &Value) -> Vec<f64> {
    let completion = json["token_logprobs"].as_array().into_iter().flatten();
    let chat = json["content"].as_array().into_iter().flatten().map(|token| &token["logprob"]);
    completion.chain(chat).filter_map(Value::as_f64).collect()
}
