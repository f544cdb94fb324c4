//! Decoding rows that begin with the same blocks: who shares what, and where results go.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::layout::{decode_max, shared_max};
use super::super::step::Ways;
use super::*;

fn limits(shared: Option<usize>) -> Limits {
    Limits {
        max_tokens: 4096,
        max_slots: 512,
        max_model_len: 1 << 20,
        vocab: 100,
        blocks: [1 << 20; 2],
        windows: [None, Some(100)],
        used: [true; 2],
        gqa_group: 4,
        ways: Ways { whole_rows: 128, prefill: true, runs: Some(33), shared },
        partials: 4000,
        tables: 1 << 20,
    }
}

/// A row of a step.
#[derive(Clone, Copy, Debug)]
struct Row {
    context: usize,
    len: usize,
    /// Whose blocks it begins with, and how many of them.
    prefix: (usize, usize),
}

/// What `Step` has of these rows, in any group.
fn arrays(rows: &[Row]) -> (Vec<RowMeta>, Vec<i32>) {
    let (mut metas, mut tables, mut start) = (Vec::new(), Vec::new(), 0);
    for (index, row) in rows.iter().enumerate() {
        let offset = tables.len() as i32;
        let (start_here, len, context) = (start, row.len as i32, row.context as i32);
        start += len;
        let (table_offset, table_first) = ([offset; 2], [0; 2]);
        metas.push(RowMeta {
            start: start_here,
            len,
            context,
            slot: index as i32,
            table_offset,
            table_first,
        });
        let block = |block: usize| match block < row.prefix.1 {
            true => row.prefix.0 * 10_000 + block,
            false => (1000 + index) * 10_000 + block,
        };
        tables.extend((0..(row.context + row.len).div_ceil(BLOCK_TOKENS)).map(|i| block(i) as i32));
    }
    (metas, tables)
}

fn divided(rows: &[Row], group: usize, limits: &Limits) -> Items {
    let (metas, tables) = arrays(rows);
    let mut items = Items::default();
    for (index, row) in rows.iter().enumerate() {
        items.push(index, (row.context, row.len), limits.windows[group], limits);
    }
    items.finish(group, (&metas, &tables), limits);
    items
}

fn row(context: usize, prefix: (usize, usize)) -> Row {
    Row { context, len: 1, prefix }
}

#[test]
fn rows_with_the_same_blocks_read_them_once() {
    // Two alone, 40 that share 2048 and a few tokens, of which the last has barely more than them.
    let mut rows = vec![row(99, (0, 0)), row(299, (1, 0))];
    rows.extend((0..39).map(|index| row(2100 + index, (2, 130))));
    rows.push(row(2048, (2, 130)));
    let items = divided(&rows, 0, &limits(Some(16)));
    let told: Vec<_> =
        items.shared.iter().map(|i| (i.row, i.n_rows, i.key_begin, i.key_end, i.partial, i.stride)).collect();
    // The second row alone has three runs, and results: those of the others stand behind. Each has eight.
    let piece = |piece: i32| (2, 32, 256 * piece, 256 * (piece + 1), 3 + piece, 8);
    assert_eq!(told[..8], std::array::from_fn::<_, 8, _>(|index| piece(index as i32)));
    let piece = |piece: i32| (34, 8, 256 * piece, 256 * (piece + 1), 3 + 32 * 8 + piece, 8);
    assert_eq!(told[8..], std::array::from_fn::<_, 8, _>(|index| piece(index as i32)));
    let told = |row: i32| {
        let of_row = items.decode.iter().filter(|item| item.row == row);
        let tell =
            |i: &DecodeItem| (i.key_begin, i.key_end, i.partial, i.partial_first, i.n_partials, i.n_runs);
        of_row.map(tell).collect::<Vec<_>>()
    };
    assert_eq!(told(0), [(0, 100, -1, 0, 1, 1)]);
    assert_eq!(told(1), [(0, 128, 0, 0, 3, 3), (128, 256, 1, 0, 3, 3), (256, 300, 2, 0, 3, 3)]);
    assert_eq!(told(2), [(2048, 2101, -1, 3, 9, 1)]);
    assert_eq!(told(41), [(2048, 2049, -1, 3 + 39 * 8, 9, 1)]);
}

#[test]
fn own_runs_stand_behind_what_is_shared() {
    // Of two tiles, and up to 600 own keys in runs of 192.
    let rows: Vec<Row> = (0..33).map(|index| row(256 + 18 * index, (0, 16))).collect();
    let items = divided(
        &rows,
        0,
        &Limits { ways: Ways { runs: Some(60), ..limits(Some(1)).ways }, ..limits(Some(1)) },
    );
    assert_eq!(items.shared.len(), 2);
    let stride = items.shared[0].stride;
    let last: Vec<_> = items.decode.iter().filter(|item| item.row == 32).collect();
    assert!(last.len() > 1 && stride == 1 + last.len() as i32, "{last:?} {stride}");
    for (index, item) in last.iter().enumerate() {
        assert_eq!((item.partial_first, item.partial), (32 * stride, 32 * stride + 1 + index as i32));
        assert_eq!((item.n_partials, item.n_runs), (stride, stride - 1));
    }
}

#[test]
fn rows_that_stand_apart_or_see_a_window_share_nothing() {
    let check = |rows: &[Row], group: usize, limits: &Limits, expected: usize| {
        assert_eq!(divided(rows, group, limits).shared.len(), expected, "{rows:?}");
    };
    let same = vec![row(2100, (0, 128)); 16];
    check(&same, 0, &limits(Some(1)), 1);
    check(&same, 1, &limits(Some(1)), 0);
    check(&same, 0, &limits(None), 0);
    // A longer row after each seventh: their tokens are not one behind the other.
    let mut apart = same.clone();
    apart.insert(14, Row { len: 2, ..same[0] });
    apart.insert(7, Row { len: 2, ..same[0] });
    check(&apart, 0, &limits(Some(1)), 0);
    // The query itself is in the last shared block.
    check(&vec![row(255, (0, 16)); 64], 0, &limits(Some(1)), 0);
    check(&vec![row(256, (0, 16)); 64], 0, &limits(Some(1)), 2);
    // No room for the results of 16 rows.
    check(&same, 0, &Limits { partials: 31, ..limits(Some(1)) }, 0);
    check(&same, 0, &Limits { partials: 32, ..limits(Some(1)) }, 1);
}

fn random_rows(rng: &mut StdRng, shares: bool) -> Vec<Row> {
    let (mut rows, mut prefix) = (Vec::new(), 0);
    while rows.len() < 200 {
        prefix += 1;
        let blocks = if shares { rng.random_range(0..100) } else { 0 };
        let longest = rng.random_range(1..3000);
        for _ in 0..rng.random_range(1..60) {
            let len = if rng.random_bool(0.02) { rng.random_range(2..100) } else { 1 };
            rows.push(Row { context: rng.random_range(longest / 2..longest), len, prefix: (prefix, blocks) });
        }
    }
    rows
}

#[test]
fn without_common_blocks_items_are_as_before() {
    let mut rng = StdRng::seed_from_u64(1);
    for _ in 0..20 {
        let rows = random_rows(&mut rng, false);
        assert_eq!(divided(&rows, 0, &limits(Some(16))), divided(&rows, 0, &limits(None)));
    }
}

/// Every row sees each of its keys once, and every partial result is written once, within what there is, and read by its row.
#[test]
fn all_keys_are_seen_once() {
    let mut shared = 0;
    for seed in 0..200 {
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let rows = random_rows(&mut rng, true);
        let most = rng.random_range(1..70);
        let partials = rng.random_range(1..4000);
        let limits = Limits { partials, ..limits(Some(most)) };
        let items = divided(&rows, 0, &limits);
        shared += items.shared.len();
        check_all(&rows, &items, &limits);
        assert!(
            items.shared.len() <= shared_max(rows.len(), most).min(shared_max(limits.max_slots, partials))
        );
        assert!(items.decode.len() <= decode_max(rows.len(), 33));
    }
    assert!(shared > 1000, "the steps share too little: {shared}");
}

fn check_all(rows: &[Row], items: &Items, limits: &Limits) {
    let (metas, tables) = arrays(rows);
    let mut keys: BTreeMap<usize, Vec<Range<i32>>> = BTreeMap::new();
    let mut written: BTreeMap<i32, usize> = BTreeMap::new();
    for item in &items.shared {
        assert!((1..=32).contains(&item.n_rows), "{item:?}");
        assert!(
            item.key_begin < item.key_end && (item.key_begin | item.key_end) % TILE_KEYS as i32 == 0,
            "{item:?}"
        );
        let blocks = |row: usize| {
            let table = &tables[metas[row].table_offset[0] as usize..];
            &table[item.key_begin as usize / BLOCK_TOKENS..item.key_end as usize / BLOCK_TOKENS]
        };
        for index in 0..item.n_rows {
            let row = (item.row + index) as usize;
            assert_eq!(metas[row].start, metas[item.row as usize].start + index, "{item:?}");
            assert!(rows[row].len == 1 && item.key_end <= metas[row].context, "{item:?}");
            assert_eq!(blocks(row), blocks(item.row as usize), "{item:?}");
            keys.entry(row).or_default().push(item.key_begin..item.key_end);
            assert_eq!(written.insert(item.partial + index * item.stride, row), None, "{item:?}");
        }
    }
    for item in &items.decode {
        keys.entry(item.row as usize).or_default().push(item.key_begin..item.key_end);
        assert_eq!(item.partial < 0, item.n_runs == 1, "{item:?}");
        if item.partial >= 0 {
            assert_eq!(written.insert(item.partial, item.row as usize), None, "{item:?}");
        }
    }
    assert!(written.keys().all(|place| (0..limits.partials as i32).contains(place)));
    for item in &items.decode {
        let in_memory = item.n_partials - i32::from(item.n_runs == 1);
        let read = item.partial_first..item.partial_first + in_memory;
        assert!(read.clone().all(|place| written.get(&place) == Some(&(item.row as usize))), "{item:?}");
        let of_row = written.values().filter(|row| **row == item.row as usize).count();
        assert_eq!(of_row, in_memory as usize, "{item:?}");
    }
    for (row, mut seen) in keys {
        seen.sort_by_key(|keys| keys.start);
        assert!(seen.windows(2).all(|pair| pair[0].end == pair[1].start), "row {row}: {seen:?}");
        let end = (rows[row].context + rows[row].len) as i32;
        assert_eq!((seen[0].start, seen[seen.len() - 1].end), (0, end), "row {row}");
    }
}
