//! Channels: many requests' messages in one stream, and nothing else about the requests changed.

use std::collections::BTreeMap;
use std::time::Duration;

use thalweg_proto::v1;
use thalweg_proto::v1::worker_client::WorkerClient;
use tokio::time::timeout;
use tonic::Streaming;
use tonic::transport::Channel;

use super::{FAST, start};
use crate::fixture::{ATTEMPT, Fixture, PATIENCE, generate, load_until, read, request, sampled};

type Messages = Streaming<v1::ChannelMessage>;

async fn open(client: &mut WorkerClient<Channel>) -> (u64, Messages) {
    let ask = v1::OpenChannelRequest { router_id: "test".to_owned() };
    let mut messages = client.open_channel(ask).await.expect("a channel").into_inner();
    let greeting = messages.message().await.expect("open").expect("a greeting");
    assert!(greeting.channel > 0 && greeting.responses.is_empty(), "{greeting:?}");
    (greeting.channel, messages)
}

fn joining(channel: u64, attempt_id: u64, prompt: &[u32], max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest { attempt_id, channel, ..request(prompt, max_tokens) }
}

/// Reads a channel until so many choices have ended: tokens, and messages about prompts, by attempt.
async fn read_channel(messages: &mut Messages, ends: usize) -> BTreeMap<u64, (Vec<u32>, usize)> {
    let mut by_attempt: BTreeMap<u64, (Vec<u32>, usize)> = BTreeMap::new();
    let mut ended = 0;
    while ended < ends {
        let message =
            timeout(PATIENCE, messages.message()).await.expect("in time").expect("open").expect("a message");
        for response in message.responses {
            let (tokens, prompts) = by_attempt.entry(response.attempt_id).or_default();
            *prompts += usize::from(response.prompt.is_some());
            for delta in response.deltas {
                ended += usize::from(delta.finish_reason() != v1::FinishReason::Unspecified);
                tokens.extend(delta.token_ids);
            }
        }
    }
    by_attempt
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_join_say_the_same_and_their_streams_end_in_order() {
    let (_sim, Fixture { worker, mut client }) = start(FAST, "").await;
    let mut alone = BTreeMap::new();
    for number in 1..=4u32 {
        let reply = generate(&mut client, request(&[number; 20], 30)).await.unwrap();
        alone.insert(u64::from(number), (reply.tokens().to_vec(), 1));
    }
    let (channel, mut messages) = open(&mut client).await;
    let mut streams = Vec::new();
    for number in 1..=4u32 {
        let joining = joining(channel, number.into(), &[number; 20], 30);
        streams.push(client.generate(joining).await.unwrap().into_inner());
    }
    assert_eq!(read_channel(&mut messages, 4).await, alone);
    for mut stream in streams {
        let reply = timeout(PATIENCE, read(&mut stream)).await.unwrap();
        assert!(reply.error.is_none() && reply.choices.is_empty() && reply.prompt.is_none(), "{reply:?}");
    }
    assert_eq!(worker.engine().stats().counters.finished_length, 8);
    worker.shutdown(Duration::ZERO).await;
    assert!(messages.message().await.unwrap().is_none(), "the channel ends well with the worker");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_channel_does_not_take_comes_by_the_stream() {
    let (sim, Fixture { worker, mut client }) = start(FAST, "").await;
    let (channel, _messages) = open(&mut client).await;
    let with_logprobs = sampled(joining(channel, ATTEMPT, &[7; 20], 5), |s| s.logprobs = Some(1));
    assert_eq!(generate(&mut client, with_logprobs).await.unwrap().choices[&0].logprobs.len(), 5);
    let unknown = joining(channel + 1, ATTEMPT, &[7; 20], 5);
    assert_eq!(generate(&mut client, unknown).await.unwrap().tokens().len(), 5);
    sim.switch(&format!("{FAST}faults: {{slow_seconds: 0.001}}"));
    let spoilt = async {
        while generate(&mut client, joining(channel, ATTEMPT, &[7; 20], 5)).await.unwrap().choices.is_empty()
        {
        }
    };
    timeout(PATIENCE, spoilt).await.expect("a stream that faults can spoil");
    worker.shutdown(Duration::ZERO).await;
}

/// Either of a request's two streams ends it when it is dropped.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_decodes_for_a_reader_that_is_gone() {
    let (_sim, Fixture { worker, mut client }) = start(FAST, "").await;
    for drops_channel in [true, false] {
        let (channel, mut messages) = open(&mut client).await;
        let mut stream = client.generate(joining(channel, 1, &[3; 20], 900)).await.unwrap().into_inner();
        timeout(PATIENCE, messages.message()).await.expect("in time").expect("open").expect("a message");
        load_until(&mut client, |load| load.running == 1).await;
        if drops_channel {
            drop(messages);
            assert!(timeout(PATIENCE, read(&mut stream)).await.unwrap().choices.is_empty());
        } else {
            drop(stream);
        }
        let load = load_until(&mut client, |load| load.running == 0).await;
        assert_eq!(load.kv_blocks_free + load.kv_blocks_cached, load.kv_blocks_total);
    }
    worker.shutdown(Duration::ZERO).await;
}
