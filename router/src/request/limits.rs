//! Bounds on what one request may ask for. Each refusal names the bound.

/// Prompts of one completions request.
pub const PROMPTS_MAX: usize = 256;

/// Inputs of one embeddings request; OpenAI's number.
pub const INPUTS_MAX: usize = 2048;

/// Choices of one request, over all its prompts.
pub const TOTAL_CHOICES_MAX: usize = 1024;

/// Stop strings of one request.
pub const STOP_STRINGS_MAX: usize = 16;

/// Bytes of one stop string.
pub const STOP_BYTES_MAX: usize = 1024;

/// Ids in `stop_token_ids`.
pub const STOP_IDS_MAX: usize = 256;

/// Entries of `logit_bias`.
pub const LOGIT_BIAS_MAX: usize = 1024;

/// Alternatives per token in `logprobs`, `top_logprobs` and `prompt_logprobs`.
pub const LOGPROBS_MAX: u32 = 20;

/// Messages of one chat.
pub const MESSAGES_MAX: usize = 16_384;

/// Tools of one request.
pub const TOOLS_MAX: usize = 1024;

/// Characters of a tool's name.
pub const TOOL_NAME_CHARS_MAX: usize = 128;

/// Bytes of `cache_salt`.
pub const CACHE_SALT_BYTES_MAX: usize = 256;

/// JSON values in one body: each takes some 80 bytes once parsed, so that a body of ones and commas would take forty
/// times its size.
pub const JSON_VALUES_MAX: usize = 1 << 20;

/// Entries of `metadata`, and characters of each, as OpenAI has them.
pub const METADATA_ENTRIES_MAX: usize = 16;
/// Characters of a key of `metadata`.
pub const METADATA_KEY_CHARS_MAX: usize = 64;
/// Characters of a value of `metadata`.
pub const METADATA_VALUE_CHARS_MAX: usize = 512;
