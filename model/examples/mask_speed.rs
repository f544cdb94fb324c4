//! What a grammar costs: `mask_speed MODEL SCHEMA.json [TOKENS]`. Answers are drawn at random from the masks, two
//! times of three from what ends or separates things in JSON, if there is any: else they would be one long string.
#![expect(clippy::disallowed_types, clippy::disallowed_methods, reason = "what is measured is real time")]

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::grammar::{GrammarSource, Grammars, JsonBlanks};
use thalweg_model::tokenizer::Tokenizer;

#[expect(clippy::print_stdout, reason = "the result is what stdout is for")]
fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, model, schema, rest @ ..] = args.as_slice() else {
        return Err("mask_speed MODEL SCHEMA.json [TOKENS]".into());
    };
    let wanted: usize = rest.first().map_or(Ok(2000), |tokens| tokens.parse())?;
    let tokenizer = Tokenizer::new(&Checkpoint::open(Path::new(model))?.tokenizer_bundle()?)?;
    let begun = Instant::now();
    let grammars = Grammars::new(&tokenizer)?;
    println!("factory of {} tokens   {:8.1} ms", tokenizer.vocab_size(), ms(begun.elapsed()));
    let source = GrammarSource::JsonSchema(std::fs::read_to_string(schema)?);
    let begun = Instant::now();
    let grammar = grammars.compile(&source, JsonBlanks::default())?;
    println!("compile                  {:8.2} ms", ms(begun.elapsed()));
    let (mut copies, mut masks, mut steps, mut answers) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let (mut longest, mut replays) = (Vec::new(), Vec::new());
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    while masks.len() < wanted {
        let begun = Instant::now();
        let mut matcher = grammar.matcher();
        copies.push(begun.elapsed());
        let mut answer = Vec::new();
        while !matcher.is_stopped() && answer.len() < 200 {
            let begun = Instant::now();
            let mask = matcher.mask(&[])?;
            masks.push(begun.elapsed());
            let mut ids = mask.ids();
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let is_structural = |id: &u32| {
                tokenizer.token_bytes(*id).first().is_some_and(|byte| b"\"}],:{[ \n".contains(byte))
            };
            if !(seed >> 20).is_multiple_of(3) && ids.iter().any(is_structural) {
                ids.retain(is_structural);
            }
            let id = ids[(seed >> 33) as usize % ids.len()];
            if matcher.eos_ids().contains(&id) {
                break;
            }
            let begun = Instant::now();
            matcher.consume(&[id])?;
            steps.push(begun.elapsed());
            answer.push(id);
        }
        if answer.len() > longest.len() {
            longest = answer;
        }
        answers += 1;
    }
    for _ in 0..5 {
        let begun = Instant::now();
        grammar.matcher().consume(&longest)?;
        replays.push(begun.elapsed());
    }
    println!("{answers} answers, {} masks", masks.len());
    for (what, times) in
        [("copy", &mut copies), ("mask", &mut masks), ("consume", &mut steps), ("replay", &mut replays)]
    {
        times.sort();
        let at = |share: f64| us(times[((times.len() - 1) as f64 * share) as usize]);
        println!(
            "{what:8} us: mean {:7.1}  p50 {:7.1}  p90 {:7.1}  p99 {:8.1}  max {:9.1}",
            us(times.iter().sum::<Duration>()) / times.len() as f64,
            at(0.5),
            at(0.9),
            at(0.99),
            at(1.0)
        );
    }
    println!("the replay is of {} tokens", longest.len());
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
