//! Golden vectors, computed with the Python package `blake3` from the formula in `block_hash`.

use thalweg_proto::block_hash::{BlockHash, HashRoot, child, full_blocks};

fn hex(hash: BlockHash) -> String {
    format!("{hash:?}")
}

fn check(adapter: &str, scope: &str, salt: &str, expected: [&str; 3]) {
    let fingerprint: Vec<u8> = if scope.is_empty() { vec![] } else { (0..32).collect() };
    let root = HashRoot { fingerprint: &fingerprint, adapter, scope, salt }.hash();
    let first = child(root, &(0..16).collect::<Vec<u32>>());
    let second = child(first, &[u32::MAX; 16]);
    assert_eq!([hex(root), hex(first), hex(second)], expected);
}

#[test]
fn hashes_agree_with_another_implementation() {
    // cache-index-04.
    check(
        "",
        "",
        "",
        [
            "049ae4717fa06aaf13e916096c90215d",
            "eb7e9ddfa6ea7336d8d3cc041ce9c128",
            "be16a7cecb3ff7105ce15e5753a47dd6",
        ],
    );
    check(
        "",
        "shared",
        "",
        [
            "f650b062866cd58ef7a46d5ffa0a6440",
            "f5062408560316ad4eb8371c2c56284f",
            "6e119acd77e29d167487b82ec91d6664",
        ],
    );
    check(
        "lora-a",
        "tenant-1",
        "pepper",
        [
            "103adcea6298d63bc21f60dab5d68892",
            "d923df82602d8aeb915cb947dcba038a",
            "a256f376c7b85fc03888d73011e12318",
        ],
    );
}

#[test]
fn scope_and_salt_cannot_be_moved_into_each_other() {
    check(
        "",
        "tenant-1pepper",
        "",
        [
            "0064eec1b176adc63f936efee9c00397",
            "5a1085aabe7c83560f9e55ffd87c9f62",
            "3ed911593ee0431244b9dc8d125ed10a",
        ],
    );
}

#[test]
fn blocks_longer_than_the_buffer_hash_whole() {
    let fingerprint: Vec<u8> = (0..32).collect();
    let root = HashRoot { fingerprint: &fingerprint, adapter: "", scope: "shared", salt: "" }.hash();
    let hash = child(root, &(1000..1100).collect::<Vec<u32>>());
    assert_eq!(hex(hash), "8bd41c03f3919bc363e012b71895883f");
}

#[test]
fn a_part_block_has_no_hash() {
    let root = HashRoot { fingerprint: &[], adapter: "", scope: "", salt: "" }.hash();
    let tokens: Vec<u32> = (0..16).chain([u32::MAX; 16]).chain([7]).collect();
    let hashes: Vec<String> = full_blocks(root, &tokens, 16).into_iter().map(hex).collect();
    assert_eq!(hashes, ["eb7e9ddfa6ea7336d8d3cc041ce9c128", "be16a7cecb3ff7105ce15e5753a47dd6"]);
}
