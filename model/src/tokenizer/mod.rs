//! Text to token ids and back.

mod bundle;
mod control;
mod detokenizer;
pub(crate) mod gguf;
pub(crate) mod hub;
mod json;
mod spm;
mod vocabulary;

use std::borrow::Cow;
use std::sync::OnceLock;

use tokenizers::models::bpe::BPE;
use tokenizers::{
    DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

pub use self::bundle::TokenizerBundle;
pub(crate) use self::control::ControlTokens;
use self::control::Piece;
pub use self::detokenizer::Detokenizer;
use self::json::{Description, malformed};
use self::vocabulary::Vocabulary;
use crate::chat_template::RenderedChat;
use crate::error::ModelError;
use crate::grammar::{GrammarError, Grammars};

type Inner = TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A tokenizer, immutable and shared.
pub struct Tokenizer {
    inner: Inner,
    control: ControlTokens,
    vocabulary: Vocabulary,
    /// The text's very first piece gets a leading space, unless it is a control token or has one.
    prefix_first: bool,
    bundle: TokenizerBundle,
    /// Made when the first answer is to have a structure.
    grammars: OnceLock<Result<Grammars, GrammarError>>,
}

/// Whether control tokens in the text become control tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// `<|im_end|>` in the text is that token.
    Parse,
    /// It is ten plain characters.
    Plain,
}

impl Tokenizer {
    /// Builds the tokenizer; checks that ids agree with the bundle's vocabulary.
    pub fn new(bundle: &TokenizerBundle) -> Result<Self, ModelError> {
        let description = Description::parse(&bundle.tokenizer_json)?;
        let mut inner: Inner =
            bundle.tokenizer_json.parse().map_err(|error| malformed(format!("{error}")))?;
        let vocabulary = Vocabulary::new(&inner, &description, bundle.vocab_size)?;
        let control = ControlTokens::new(&description, bundle.vocab_size)?;
        let prefix_first = json::take_first_prefix(&mut inner);
        json::check_unk(&inner)?;
        inner.set_encode_special_tokens(true);
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| malformed(format!("{error}")))?;
        let bundle = bundle.clone_without_json();
        Ok(Self { inner, control, vocabulary, prefix_first, bundle, grammars: OnceLock::new() })
    }

    /// Ids of a text. `bos` adds the beginning of sequence where the model wants one and the text has none.
    pub fn encode(&self, text: &str, specials: Specials, bos: bool) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 4 + 1);
        match specials {
            Specials::Parse => self.encode_pieces(text, None, &mut ids),
            Specials::Plain => self.encode_text(text, true, &mut ids),
        }
        match self.bundle.bos_id {
            Some(id) if bos && self.bundle.add_bos && ids.first() != Some(&id) => ids.insert(0, id),
            _ => {}
        }
        ids
    }

    /// Ids of a text that is to be embedded, control tokens in it included. `specials` adds what the model's tokenizer writes
    /// around a text.
    pub fn encode_to_embed(&self, text: &str, specials: bool) -> Vec<u32> {
        let mut ids = self.encode(text, Specials::Parse, specials);
        match self.bundle.text_end_id {
            Some(id) if specials && ids.last() != Some(&id) => ids.push(id),
            _ => {}
        }
        ids
    }

    /// Ids of a rendered chat: what the template wrote is parsed for control tokens, what users wrote is not. No
    /// beginning of sequence is added: templates write their own.
    pub fn encode_chat(&self, chat: &RenderedChat) -> Vec<u32> {
        let mut ids = Vec::with_capacity(chat.text.len() / 4 + 1);
        self.encode_pieces(&chat.text, Some(chat.marker), &mut ids);
        ids
    }

    /// Text of ids; invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::new(self, &[], skip_special);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push_to(self, id, &mut text);
        }
        text + &detokenizer.finish(self)
    }

    /// Bytes that a token stands for; empty for a control token.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.vocabulary.bytes(id, true).to_vec()
    }

    /// The token's own text as people write it, control tokens included (`logprobs` show it).
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.vocabulary.bytes(id, false)).into_owned()
    }

    /// The id is a control token.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocabulary.is_special(id)
    }

    /// Ids of 0 up to this are valid.
    pub fn vocab_size(&self) -> usize {
        self.bundle.vocab_size
    }

    /// The bundle it was made of, without its `tokenizer_json`, which is large and no longer needed.
    pub fn bundle(&self) -> &TokenizerBundle {
        &self.bundle
    }

    /// Compiles grammars for this vocabulary. The first call takes a good part of a second.
    pub fn grammars(&self) -> Result<&Grammars, GrammarError> {
        self.grammars.get_or_init(|| Grammars::new(self)).as_ref().map_err(Clone::clone)
    }

    pub(crate) fn control(&self) -> &ControlTokens {
        &self.control
    }

    /// Splits at control tokens first, so that no marker within users' text can be lost on the way.
    fn encode_pieces(&self, text: &str, marker: Option<char>, ids: &mut Vec<u32>) {
        let mut at_start = true;
        for piece in self.control.split(text) {
            match piece {
                Piece::Control(id) => ids.push(id),
                Piece::Text(text) => {
                    let text = match marker {
                        Some(marker) if text.contains(marker) => Cow::Owned(text.replace(marker, "")),
                        _ => Cow::Borrowed(text),
                    };
                    self.encode_text(&text, at_start, ids);
                }
            }
            at_start = false;
        }
    }

    fn encode_text(&self, text: &str, at_start: bool, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        let prefixed;
        let text = if self.prefix_first && at_start && !text.starts_with([' ', spm::SPACE]) {
            prefixed = format!(" {text}");
            &prefixed
        } else {
            text
        };
        let encoding =
            self.inner.encode_fast(text, false).expect("a vocabulary without a stray unk encodes all text");
        ids.extend_from_slice(encoding.get_ids());
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("bundle", &self.bundle).finish_non_exhaustive()
    }
}
