//! Stop strings in a stream of text: what may still become one is held back.

/// Finds the stop string that is complete first, whatever pieces the text comes in.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    patterns: Vec<Pattern>,
    held: String,
    /// Leaves the stop string at the end of the text.
    include: bool,
}

/// What became certain with a piece of text.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Released {
    pub(crate) text: String,
    /// Index of the stop string that ended the text.
    pub(crate) stop: Option<usize>,
}

impl StopMatcher {
    pub(crate) fn new(stops: &[String], include: bool) -> Self {
        let patterns = stops.iter().map(|stop| Pattern::new(stop)).collect();
        Self { patterns, held: String::new(), include }
    }

    /// Takes more text. Of two stop strings that end at the same byte, the longer one counts.
    pub(crate) fn push(&mut self, text: &str) -> Released {
        if self.patterns.is_empty() {
            return Released { text: text.to_owned(), stop: None };
        }
        let before = self.held.len();
        self.held.push_str(text);
        for at in before..self.held.len() {
            let byte = self.held.as_bytes()[at];
            if let Some((stop, length)) = self.step(byte) {
                self.held.truncate(if self.include { at + 1 } else { at + 1 - length });
                return Released { text: self.finish(), stop: Some(stop) };
            }
        }
        // A match begins with a pattern's first byte, so the cut never splits a character.
        let keep = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - keep);
        Released { text: std::mem::replace(&mut self.held, kept), stop: None }
    }

    /// What was held back, at the end of the text.
    pub(crate) fn finish(&mut self) -> String {
        self.patterns.iter_mut().for_each(|p| p.matched = 0);
        std::mem::take(&mut self.held)
    }

    fn step(&mut self, byte: u8) -> Option<(usize, usize)> {
        let mut longest = None;
        for (index, pattern) in self.patterns.iter_mut().enumerate() {
            let length = pattern.bytes.len();
            if pattern.step(byte) && longest.is_none_or(|(_, best)| length > best) {
                longest = Some((index, length));
            }
        }
        longest
    }
}

/// One stop string as a Knuth-Morris-Pratt automaton: constant work per byte.
#[derive(Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// For each length: the longest proper prefix that is a suffix of it too.
    border: Vec<usize>,
    matched: usize,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut border = vec![0; bytes.len() + 1];
        let mut length = 0;
        for at in 1..bytes.len() {
            while length > 0 && bytes[at] != bytes[length] {
                length = border[length];
            }
            length += usize::from(bytes[at] == bytes[length]);
            border[at + 1] = length;
        }
        Self { bytes, border, matched: 0 }
    }

    /// True if the pattern is complete with this byte.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.border[self.matched];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        if self.matched < self.bytes.len() {
            return false;
        }
        self.matched = self.border[self.matched];
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `text` through in every way of cutting it into two pieces, and character by character.
    fn check(text: &str, stops: &[&str], expected: &str, stop: Option<usize>) {
        let stops: Vec<_> = stops.iter().map(|s| (*s).to_owned()).collect();
        let run = |pieces: &[&str]| {
            let mut matcher = StopMatcher::new(&stops, false);
            let mut all = String::new();
            for piece in pieces {
                let released = matcher.push(piece);
                all.push_str(&released.text);
                assert!(stops.iter().all(|s| !all.contains(s.as_str())), "{all:?} was released");
                if released.stop.is_some() {
                    return (all, released.stop);
                }
            }
            all.push_str(&matcher.finish());
            (all, None)
        };
        let cuts = (0..=text.len()).filter(|at| text.is_char_boundary(*at));
        for (left, right) in cuts.map(|at| text.split_at(at)) {
            assert_eq!(run(&[left, right]), (expected.to_owned(), stop), "{left:?} + {right:?}");
        }
        let characters: Vec<_> = text.split("").collect();
        assert_eq!(run(&characters), (expected.to_owned(), stop));
    }

    #[test]
    fn text_ends_right_before_the_stop_string() {
        // stop-01.
        check("one two three four", &["three"], "one two ", Some(0));
        check("one two three four", &["o three f"], "one tw", Some(0));
        check("one two three four", &["four", "two"], "one ", Some(1));
        check("one two", &["o"], "", Some(0));
        check("one two three four", &["five", "ree fou!"], "one two three four", None);
    }

    #[test]
    fn what_only_looked_like_a_stop_string_is_released() {
        check("big sunfl", &["sunflower oil"], "big sunfl", None);
        check("aaaaab", &["aaab"], "aa", Some(0));
        check("ababac", &["abac"], "ab", Some(0));
    }

    #[test]
    fn the_first_to_be_complete_wins_and_of_those_the_longest() {
        // stop-02.
        check("xabc", &["ab", "abc"], "x", Some(0));
        check("xabc", &["abc", "ab"], "x", Some(1));
        check("xabc", &["c", "bc"], "xa", Some(1));
    }

    #[test]
    fn characters_of_several_bytes_stay_whole() {
        check("a😀😃b", &["😃"], "a😀", Some(0));
        check("žluť 大阪", &["大阪城"], "žluť 大阪", None);
    }

    #[test]
    fn long_stop_strings_match() {
        let stop = "x".repeat(200);
        check(&format!("a{}y{stop}b", "x".repeat(199)), &[&stop], &format!("a{}y", "x".repeat(199)), Some(0));
    }

    #[test]
    fn the_stop_string_can_be_left_in() {
        let mut matcher = StopMatcher::new(&["st".to_owned()], true);
        assert_eq!(matcher.push("a s"), Released { text: "a ".to_owned(), stop: None });
        assert_eq!(matcher.push("top"), Released { text: "st".to_owned(), stop: Some(0) });
    }
}
