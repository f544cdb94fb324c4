//! SentencePiece's BPE: pieces have scores, and the neighbours whose union scores best are merged first.

use hashbrown::HashMap;

/// The visible space of SentencePiece.
pub(super) const SPACE: char = '▁';

/// The byte of a fallback piece such as `<0x0A>`.
pub(super) fn parse_byte(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// Merge rules, best first, that act as the scores do: every way to cut a piece into two pieces is a rule, at the rank
/// of the whole. `mergeable` tells which ids may come out of a merge: no control tokens or bytes.
pub(super) fn merges<'a>(
    pieces: &[&'a str],
    scores: &[f32],
    ids: &HashMap<&str, u32>,
    mergeable: impl Fn(usize) -> bool,
) -> Vec<(&'a str, &'a str)> {
    let mut order: Vec<usize> = (0..pieces.len()).filter(|id| mergeable(*id)).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let mut rules = Vec::with_capacity(order.len() * 2);
    for id in order {
        let piece = pieces[id];
        let first = rules.len();
        rules.extend(piece.char_indices().skip(1).filter_map(|(at, _)| {
            let (left, right) = piece.split_at(at);
            Some(((*ids.get(left)?, *ids.get(right)?), (left, right)))
        }));
        // The order in which Hugging Face's conversion ranks the cuts of one piece.
        rules[first..].sort_by_key(|(pair, _)| *pair);
    }
    rules.into_iter().map(|(_, rule)| rule).collect()
}
