"""A byte-level tokenizer without merges: a token a byte, control tokens, and pairs of letters that text never becomes
but that a model may write."""

from families import ADDS_BOS, BOS, EOS, VOCAB

CONTROL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def files(name):
    """File name to JSON content."""
    first, last = CONTROL[BOS - 256], CONTROL[EOS - 256]
    return {
        "tokenizer.json": tokenizer_json(name),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": first,
            "eos_token": last,
            "add_bos_token": name in ADDS_BOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
            "chat_template": CHAT_TEMPLATE,
        },
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS},
    }


def tokenizer_json(name):
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {char: byte for byte, char in enumerate(byte_chars())}
    vocab |= {text: 256 + index for index, text in enumerate(CONTROL)}
    letters = (first + second for first in "etaoinshr" for second in "etaoinshr")
    for index in range(len(vocab), VOCAB):
        vocab[next(letters)] = index
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 256 + index, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for index, text in enumerate(CONTROL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": begin_with_bos() if name in ADDS_BOS else byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": []},
    }


def begin_with_bos():
    bos = CONTROL[BOS - 256]
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [BOS], "tokens": [bos]}},
    }


def byte_chars():
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
