//! What requests leave behind in a worker's memory.

use serde_json::{Value, json};
use thalweg_harness::client::assert_no_failures;

use crate::support::{answers, prompt, short_or_long, sim, whole, with};

/// What allocators keep of two requests that overlapped in another way than before.
const NOISE_BYTES: u64 = 8 << 20;

/// More grammars than are kept (64), so that what comes behind them takes the place of others.
const GRAMMARS: usize = 128;

/// Long prompts, many choices with alternatives of each token, and grammars that are all different: what a worker holds for them
/// is bounded, and does not grow from round to round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_requests_leave_no_growing_memory_behind() {
    let plan = sim("step: {base_seconds: 0.0002}").workers(1).worker_args(&["--max-num-seqs", "256"]);
    let mut fleet = plan.start().await;
    for some in (0..GRAMMARS).collect::<Vec<_>>().chunks(16) {
        let bodies: Vec<_> = some.iter().map(|number| large(3 * number + 2)).collect();
        assert_no_failures("a grammar", &answers(&fleet, &bodies).await);
    }
    let mut held = Vec::new();
    for round in 0..short_or_long(10, 60) {
        let bodies: Vec<_> = (0..16).map(|i| large(3 * GRAMMARS + 16 * round + i)).collect();
        assert_no_failures("a large request", &answers(&fleet, &bodies).await);
        fleet.at_rest().await;
        held.push(fleet.workers[0].process().resident_bytes());
    }
    eprintln!("MiB behind each round: {:?}", held.iter().map(|bytes| bytes >> 20).collect::<Vec<_>>());
    let (warm, last) = (held[2], held[held.len() - 1]);
    assert!(last < warm + NOISE_BYTES, "the worker grew from {warm} to {last} bytes");
    fleet.finish().await;
}

fn large(number: usize) -> Value {
    let fields = match number % 3 {
        0 => json!({"n": 32, "logprobs": 5}),
        1 => json!({"prompt": vec![prompt(number, 400); 16], "echo": true, "logprobs": 5, "max_tokens": 1}),
        _ => json!({"guided_json": {"properties": {format!("field-{number}"): {"type": "integer"}}}}),
    };
    with(whole(&prompt(number, 100), 100), fields)
}
