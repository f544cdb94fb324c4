//! Which decoding rows of a step begin with the same blocks, so that these are read once for all of them.

use super::abi::RowMeta;
use crate::backend::cpu::BLOCK_TOKENS;

/// Keys of a tile of `attn_shared`: only whole ones are shared.
pub(super) const TILE_KEYS: usize = 128;
const TILE_BLOCKS: usize = TILE_KEYS / BLOCK_TOKENS;
/// Fewer rows are not worth a graph of their own.
pub(super) const ROWS_MIN: usize = 8;
/// Fewer tiles are not worth the partial results that they leave for each row.
const TILES_MIN: usize = 2;
/// Tiles that need not be read again, of fewest rows that are worth a launch in every layer: 4,096 keys.
const SAVED_TILES_MIN: usize = 32;
/// Tiles of an item, where there are as many: the first is waited for.
const PIECE_TILES_MIN: usize = 2;

/// Rows that share their first keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefix {
    /// Among the decoding rows.
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) tiles: usize,
    /// Items that its keys are cut into.
    pub(super) pieces: usize,
}

/// Blocks of a tile.
type Tile = [i32; TILE_BLOCKS];

/// Prefixes of these decoding rows that save the most, in order. Rows of one have one token each and stand one behind the other in the
/// step, and every key of it is behind none of their queries.
pub(super) fn find(
    decoding: impl Iterator<Item = usize>,
    group: usize,
    (rows, tables): (&[RowMeta], &[i32]),
) -> Vec<Prefix> {
    let decoding: Vec<(usize, &[Tile])> =
        decoding.map(|row| (row, tiles_of(&rows[row], group, tables))).collect();
    let same = decoding.windows(2).map(|pair| match *pair {
        [(row, tiles), (next, others)] if row + 1 == next => common(tiles, others),
        _ => 0,
    });
    let mut found = Vec::new();
    take_best(0, &same.collect::<Vec<_>>(), &mut found);
    found
}

/// Tables are cut into as many items of `rows_max` rows as keep the GPU busy, with no more than `partials` results; those behind go
/// where even one each is too many.
pub(super) fn divide(prefixes: &mut Vec<Prefix>, rows_max: usize, items: usize, partials: usize) {
    let of_rows = |prefix: &Prefix| prefix.rows.div_ceil(rows_max);
    while prefixes.iter().map(|prefix| prefix.rows).sum::<usize>() > partials {
        prefixes.pop();
    }
    let most = items.max(prefixes.iter().map(of_rows).sum());
    let tiles: usize = prefixes.iter().map(|prefix| of_rows(prefix) * prefix.tiles).sum();
    let mut piece = tiles.div_ceil(most.max(1)).max(PIECE_TILES_MIN);
    loop {
        prefixes.iter_mut().for_each(|prefix| prefix.pieces = prefix.tiles.div_ceil(piece));
        let items: usize = prefixes.iter().map(|prefix| of_rows(prefix) * prefix.pieces).sum();
        let results: usize = prefixes.iter().map(|prefix| prefix.rows * prefix.pieces).sum();
        if items <= most && results <= partials {
            return;
        }
        piece += 1;
    }
}

/// Whole tiles of blocks that all lie before the row's token, which is its only one.
fn tiles_of<'a>(row: &RowMeta, group: usize, tables: &'a [i32]) -> &'a [Tile] {
    let tiles = if row.len == 1 { row.context as usize / TILE_KEYS } else { 0 };
    tables[row.table_offset[group] as usize..][..tiles * TILE_BLOCKS].as_chunks().0
}

/// Tiles up to the first that is not the same; 0 for too few.
fn common(tiles: &[Tile], others: &[Tile]) -> usize {
    let same = tiles.iter().zip(others).take_while(|(tile, other)| tile == other).count();
    if same < TILES_MIN { 0 } else { same }
}

/// Of rows from `first` on, of which neighbours have so many tiles in common: the prefix that saves the most, then those of the rows
/// before and behind it.
fn take_best(first: usize, same: &[usize], found: &mut Vec<Prefix>) {
    let Some(Prefix { first: at, rows, tiles, pieces }) = best(same) else { return };
    take_best(first, &same[..at.saturating_sub(1)], found);
    found.push(Prefix { first: first + at, rows, tiles, pieces });
    let behind = at + rows;
    if behind < same.len() {
        take_best(first + behind, &same[behind..], found);
    }
}

/// The largest rectangle below the line of common tiles: all but one of its rows save all of its tiles.
fn best(same: &[usize]) -> Option<Prefix> {
    let mut best: Option<Prefix> = None;
    // Where rectangles begin that may still grow, and their heights, which rise.
    let mut open: Vec<(usize, usize)> = Vec::new();
    for (index, height) in same.iter().copied().chain([0]).enumerate() {
        let mut begin = index;
        while let Some((start, tiles)) = open.pop_if(|(_, tiles)| *tiles >= height) {
            begin = start;
            let (rows, saved) = (index - start + 1, (index - start) * tiles);
            let least = best.as_ref().map_or(SAVED_TILES_MIN, |best| (best.rows - 1) * best.tiles + 1);
            if rows >= ROWS_MIN && saved >= least {
                best = Some(Prefix { first: start, rows, tiles, pieces: 1 });
            }
        }
        if height > 0 {
            open.push((begin, height));
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(first: usize, rows: usize, tiles: usize, pieces: usize) -> Prefix {
        Prefix { first, rows, tiles, pieces }
    }

    #[test]
    fn rows_go_where_they_save_the_most() {
        let check = |same: &[(usize, usize)], expected: &[(usize, usize, usize)]| {
            let same: Vec<usize> =
                same.iter().flat_map(|(count, tiles)| std::iter::repeat_n(*tiles, *count)).collect();
            let mut found = Vec::new();
            take_best(0, &same, &mut found);
            let told: Vec<_> = found.iter().map(|p| (p.first, p.rows, p.tiles)).collect();
            assert_eq!(told, expected, "{same:?}");
        };
        check(&[], &[]);
        check(&[(40, 0)], &[]);
        check(&[(255, 16)], &[(0, 256, 16)]);
        // Too few rows, and too few tiles.
        check(&[(6, 1000)], &[]);
        check(&[(7, 4)], &[]);
        check(&[(7, 5)], &[(0, 8, 5)]);
        // Two that share nothing, with rows on their own around them.
        check(&[(2, 0), (9, 16), (3, 0), (19, 4), (1, 0)], &[(2, 10, 16), (14, 20, 4)]);
        check(&[(9, 16), (1, 0), (19, 4)], &[(0, 10, 16), (10, 20, 4)]);
        // All share a little, some much: a little of all is less.
        check(&[(20, 2), (200, 16), (20, 2)], &[(0, 20, 2), (20, 201, 16), (221, 20, 2)]);
        // One row that has less than the others leaves them what they have, or takes part.
        check(&[(20, 16), (1, 2), (20, 16)], &[(0, 21, 16), (21, 21, 16)]);
        check(&[(20, 16), (1, 12), (20, 16)], &[(0, 42, 12)]);
    }

    #[test]
    fn pieces_keep_the_gpu_busy() {
        let check = |of: &[(usize, usize)], items: usize, partials: usize, expected: &[usize]| {
            let mut prefixes: Vec<_> = of.iter().map(|(rows, tiles)| prefix(0, *rows, *tiles, 1)).collect();
            divide(&mut prefixes, 32, items, partials);
            let told: Vec<_> = prefixes.iter().map(|prefix| prefix.pieces).collect();
            assert_eq!(told, expected, "{of:?} {items} {partials}");
        };
        check(&[], 16, 100, &[]);
        check(&[(256, 16)], 16, 4000, &[2]);
        check(&[(64, 16)], 16, 4000, &[8]);
        // No piece is a single tile where there are two.
        check(&[(8, 16)], 16, 4000, &[8]);
        check(&[(8, 2)], 16, 4000, &[1]);
        check(&[(8, 256)], 16, 4000, &[16]);
        check(&[(8, 17)], 4, 4000, &[4]);
        // More rows than items take one each.
        check(&[(640, 16)], 16, 4000, &[1]);
        // The longer of two gets more.
        check(&[(32, 16), (32, 4)], 8, 4000, &[6, 2]);
        // As few as there is room for, or none.
        check(&[(64, 16)], 16, 200, &[3]);
        check(&[(64, 16)], 16, 64, &[1]);
        check(&[(32, 16), (32, 4)], 8, 63, &[1]);
        check(&[(64, 16)], 16, 63, &[]);
    }
}
