//! What the fuzz targets drive: all that reads what clients and models write. Built with `--cfg fuzzing` alone.

use std::sync::{Arc, LazyLock};

use serde_json::Value;
use thalweg_proto::v1;

use crate::config::Surface;
use crate::dispatch::GenerationEvent;
use crate::models::{ModelEntry, Models};
use crate::output::Assembly;
use crate::output::choice::Piece;
use crate::output::tools::{ToolFormat, ToolPlan};
use crate::request::responses::{Draft, parse_responses};
use crate::request::{
    Endpoint, Served, ValidRequest, parse_chat, parse_completion, parse_embedding, parse_object,
};
use crate::sse::chunk::{ChunkChoice, ChunkWriter, ReplyHead};
use crate::test_support::{self, read_calls};
use crate::tokenize::{TokenizedPrompt, tokenize_inputs, tokenize_request};

static MODELS: LazyLock<Models> = LazyLock::new(test_support::models);

/// A body as every endpoint takes it.
pub fn body(bytes: &[u8]) {
    for endpoint in [Endpoint::Chat, Endpoint::Completions, Endpoint::Responses] {
        drop(accept(endpoint, bytes));
    }
    let info = |_: &ModelEntry| Ok(v1::EmbeddingInfo { width: 8, pooling: v1::Pooling::Mean.into() });
    if let Ok(object) = parse_object(bytes) {
        drop(parse_embedding(object, &MODELS, &info).and_then(|mut request| tokenize_inputs(&mut request)));
    }
}

fn accept(endpoint: Endpoint, bytes: &[u8]) -> Option<(ValidRequest, Vec<TokenizedPrompt>)> {
    let surface = Surface::default();
    let served = Served { models: &MODELS, choices_max: 8, surface: &surface, draw_seed: &|| 7 };
    let object = parse_object(bytes).ok()?;
    let mut request = match endpoint {
        Endpoint::Chat => parse_chat(object, &served),
        Endpoint::Completions => parse_completion(object, &served),
        Endpoint::Responses => {
            let draft = Draft::read(object).ok()?;
            parse_responses(draft, Vec::new(), false, &served).map(|(request, _)| request)
        }
    }
    .ok()?;
    let prompts = tokenize_request(&mut request).ok()?;
    request.let_think(&prompts);
    Some((request, prompts))
}

/// A model's text as every family's calls, whole and character by character.
pub fn calls(text: &str) {
    let formats = [
        ToolFormat::Hermes,
        ToolFormat::Llama3Json,
        ToolFormat::Mistral,
        ToolFormat::Gemma3,
        ToolFormat::Json,
    ];
    for format in formats {
        for (parallel, named) in [(true, None), (false, None), (true, Some("add".to_owned()))] {
            let names = ["add", "get_weather"].map(str::to_owned).into();
            let plan = ToolPlan { format, names, parallel, named };
            let whole = read_calls(&plan, [text]);
            let pieces = read_calls(&plan, text.split_inclusive(|_: char| true));
            assert_eq!(whole, pieces, "{plan:?}");
        }
    }
}

/// Bodies whose answers take every way through the writer.
const BODIES: [(Endpoint, &str); 4] = [
    (
        Endpoint::Chat,
        r#"{"model":"tiny","messages":[{"role":"user","content":"a"}],"stop":["ab","\n\n"],"logprobs":true,"stream":true}"#,
    ),
    (
        Endpoint::Chat,
        r#"{"model":"tiny","messages":[{"role":"user","content":"a"}],"stream":true,"return_token_ids":true,
        "tools":[{"type":"function","function":{"name":"add","parameters":{"type":"object"}}}]}"#,
    ),
    (
        Endpoint::Completions,
        r#"{"model":"tiny","prompt":"a","echo":true,"logprobs":2,"stream":true,"stop":"é"}"#,
    ),
    (
        Endpoint::Completions,
        r#"{"model":"tiny","prompt":"a","skip_special_tokens":false,"stream":true,
        "stream_options":{"include_usage":true}}"#,
    ),
];

/// The first byte chooses a body; of the rest two bytes are a token each. Written a token at a time and all at once.
pub fn stream(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else { return };
    let (endpoint, body) = BODIES[usize::from(*first) % BODIES.len()];
    // Some ids are none of the vocabulary's: the router refuses them before, so here they are left out.
    let vocabulary = test_support::tokenizer::VOCAB as u32;
    let ids: Vec<u32> = rest
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])) % vocabulary)
        .collect();
    let one_by_one: Vec<&[u32]> = ids.chunks(1).collect();
    assert_eq!(write(endpoint, body, &one_by_one), write(endpoint, body, &[&ids]));
}

/// What a client makes of it: content, thoughts and calls.
fn write(endpoint: Endpoint, body: &str, groups: &[&[u32]]) -> String {
    let (request, prompts) = accept(endpoint, body.as_bytes()).expect("a sound body");
    let include_usage = request.reply().include_usage;
    let mut assembly = Assembly::new(Arc::new(request), &prompts);
    let writer = ChunkWriter::new(endpoint, &head(), include_usage);
    let (mut pieces, mut frames) = (Vec::new(), Vec::new());
    for (at, ids) in groups.iter().enumerate() {
        let last = at + 1 == groups.len();
        let reason = if last { v1::FinishReason::Length } else { v1::FinishReason::Unspecified };
        let logprobs =
            ids.iter().map(|id| v1::TokenLogprobs { token_id: *id, logprob: f32::MIN, rank: 1, top: vec![] });
        let delta = v1::ChoiceDelta {
            index: 0,
            token_ids: ids.to_vec(),
            logprobs: logprobs.collect(),
            finish_reason: reason.into(),
        };
        if assembly.push(0, GenerationEvent::Deltas(vec![delta]), &mut pieces).is_err() {
            break;
        }
        for piece in pieces.drain(..) {
            frame(&writer, &piece, &mut frames);
        }
    }
    writer.usage(&mut frames, &assembly.usage());
    said(&frames)
}

fn head() -> ReplyHead {
    let (id, model) = ("\"id\"\n".to_owned(), "tiny".to_owned());
    ReplyHead { id, object: "chat.completion.chunk", created: 0, model, system_fingerprint: String::new() }
}

fn frame(writer: &ChunkWriter, piece: &Piece, out: &mut Vec<u8>) {
    writer.reasoning(out, 0, &piece.reasoning);
    let choice = ChunkChoice { text: &piece.text, token_ids: Some(&piece.token_ids), ..Default::default() };
    writer.text(out, &choice);
    for call in &piece.calls {
        writer.call(out, 0, call);
    }
    if let Some(finish) = &piece.finish {
        writer.finish(out, 0, finish.reason, &finish.stop);
    }
}

/// Reads the frames as a client does: each must be one line of JSON.
fn said(frames: &[u8]) -> String {
    let frames = std::str::from_utf8(frames).expect("events are text");
    let mut said = [const { String::new() }; 3];
    for frame in frames.split_terminator("\n\n") {
        let json =
            frame.strip_prefix("data: ").filter(|json| !json.contains('\n')).expect("one line of data");
        let chunk: Value = serde_json::from_str(json).expect("a chunk is JSON");
        let choice = &chunk["choices"][0];
        let texts = [&choice["text"], &choice["delta"]["content"], &choice["delta"]["reasoning_content"]];
        let calls = choice["delta"]["tool_calls"].as_array().into_iter().flatten();
        said[0].extend(texts[..2].iter().filter_map(|text| text.as_str()));
        said[1].extend(texts[2].as_str());
        said[2].extend(calls.filter_map(|call| call["function"]["arguments"].as_str()));
    }
    said.join("\0")
}
