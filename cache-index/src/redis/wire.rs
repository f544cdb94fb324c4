//! Bytes of events and snapshots. Numbers are little-endian; block keys are 8 bytes each, uncompressed, since hashes do
//! not compress and a reader then takes a million of them in a few milliseconds.

use std::fmt;
use std::str::FromStr;

use thalweg_proto::ids::{WorkerEpoch, WorkerId};

use super::RedisIndexError;
use crate::replica::Position;
use crate::{BlockEvent, EventBatch};

/// First byte of everything; another schema has other key names too.
const SCHEMA: u8 = 1;
/// Bytes of a snapshot before its keys.
pub(super) const HEADER_BYTES: usize = 1 + 8 * 7;

const CLEARED: u8 = 0;
const STORED: u8 = 1;
const REMOVED: u8 = 2;

/// Name of an entry of a stream, in the order of the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryId {
    pub(super) ms: u64,
    pub(super) number: u64,
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.number)
    }
}

impl FromStr for EntryId {
    type Err = RedisIndexError;

    fn from_str(text: &str) -> Result<Self, RedisIndexError> {
        let parse =
            |(ms, number): (&str, &str)| Some(Self { ms: ms.parse().ok()?, number: number.parse().ok()? });
        text.split_once('-').and_then(parse).ok_or(RedisIndexError::Undecodable("the id of a stream's entry"))
    }
}

/// What stands before a snapshot's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Up to where events are included.
    pub(super) at: Position,
    /// Later events stand behind this entry of the shard's stream.
    pub(super) behind: EntryId,
    /// When it was written, ms since the Unix epoch by the worker's clock.
    pub(super) written_ms: u64,
    /// How many keys follow.
    pub(super) count: u64,
}

impl Header {
    /// A snapshot of these keys.
    pub(super) fn encode(&self, keys: impl Iterator<Item = u64>) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + 8 * self.count as usize);
        bytes.push(SCHEMA);
        let Position { epoch, generation, seq } = self.at;
        let EntryId { ms, number } = self.behind;
        for field in [epoch.0, generation, seq, ms, number, self.written_ms, self.count] {
            bytes.extend_from_slice(&field.to_le_bytes());
        }
        keys.for_each(|key| bytes.extend_from_slice(&key.to_le_bytes()));
        bytes
    }

    /// The header, and the bytes behind it.
    pub(super) fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), RedisIndexError> {
        let undecodable = RedisIndexError::Undecodable("a snapshot");
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Err(undecodable) };
        if header[0] != SCHEMA {
            return Err(undecodable);
        }
        let mut fields = header[1..].as_chunks::<8>().0.iter().map(|field| u64::from_le_bytes(*field));
        let mut next = || fields.next().unwrap_or_default();
        let at = Position { epoch: WorkerEpoch(next()), generation: next(), seq: next() };
        let behind = EntryId { ms: next(), number: next() };
        Ok((Self { at, behind, written_ms: next(), count: next() }, rest))
    }

    /// The keys behind a header; all of them, or an error.
    pub(super) fn keys<'a>(&self, rest: &'a [u8]) -> Result<&'a [[u8; 8]], RedisIndexError> {
        match rest.as_chunks::<8>() {
            (keys, []) if keys.len() as u64 == self.count => Ok(keys),
            _ => Err(RedisIndexError::Undecodable("a snapshot")),
        }
    }
}

/// One batch as an entry of a stream.
pub(super) fn encode_batch(worker: &WorkerId, at: Position, events: &[BlockEvent]) -> Vec<u8> {
    let keys: usize = events.iter().map(|event| event_keys(event).len()).sum();
    let name = worker.as_str().as_bytes();
    let mut bytes = Vec::with_capacity(3 + name.len() + 24 + 5 * events.len() + 8 * keys);
    bytes.push(SCHEMA);
    bytes.extend_from_slice(&(name.len() as u16).to_le_bytes());
    bytes.extend_from_slice(name);
    for field in [at.epoch.0, at.generation, at.seq] {
        bytes.extend_from_slice(&field.to_le_bytes());
    }
    for event in events {
        bytes.push(match event {
            BlockEvent::Cleared => CLEARED,
            BlockEvent::Stored(_) => STORED,
            BlockEvent::Removed(_) => REMOVED,
        });
        let keys = event_keys(event);
        bytes.extend_from_slice(&(keys.len() as u32).to_le_bytes());
        keys.iter().for_each(|key| bytes.extend_from_slice(&key.to_le_bytes()));
    }
    bytes
}

/// The batch of an entry, its `seq` counting within the generation that comes with it.
pub(super) fn decode_batch(bytes: &[u8]) -> Result<(u64, EventBatch), RedisIndexError> {
    decode(bytes).ok_or(RedisIndexError::Undecodable("a batch of events"))
}

fn decode(bytes: &[u8]) -> Option<(u64, EventBatch)> {
    let (&[SCHEMA], rest) = bytes.split_first_chunk::<1>()? else { return None };
    let (length, rest) = rest.split_first_chunk::<2>()?;
    let (name, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
    let worker = WorkerId::new(std::str::from_utf8(name).ok().filter(|name| !name.is_empty())?);
    let (fields, mut rest) = rest.split_first_chunk::<24>()?;
    let field = |i: usize| fields.as_chunks::<8>().0.get(i).map(|field| u64::from_le_bytes(*field));
    let (epoch, generation, seq) = (WorkerEpoch(field(0)?), field(1)?, field(2)?);
    let mut events = Vec::new();
    while let Some((head, behind)) = rest.split_first_chunk::<5>() {
        let [tag, count @ ..] = *head;
        let (keys, behind) = behind.split_at_checked(8 * u32::from_le_bytes(count) as usize)?;
        let keys = || keys.as_chunks::<8>().0.iter().map(|key| u64::from_le_bytes(*key)).collect::<Vec<_>>();
        events.push(match tag {
            CLEARED => BlockEvent::Cleared,
            STORED => BlockEvent::Stored(keys()),
            REMOVED => BlockEvent::Removed(keys()),
            _ => return None,
        });
        rest = behind;
    }
    (rest.is_empty() && seq > 0).then_some((generation, EventBatch { worker, epoch, seq, events }))
}

/// Keys of one event.
pub(super) fn event_keys(event: &BlockEvent) -> &[u64] {
    match event {
        BlockEvent::Stored(keys) | BlockEvent::Removed(keys) => keys,
        BlockEvent::Cleared => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_and_snapshots_come_back_and_damaged_ones_do_not() {
        let worker = WorkerId::new("w-1");
        let at = Position { epoch: WorkerEpoch(7), generation: 3, seq: 9 };
        let events = vec![
            BlockEvent::Cleared,
            BlockEvent::Removed(vec![0, u64::MAX]),
            BlockEvent::Stored(vec![5; 300]),
        ];
        let bytes = encode_batch(&worker, at, &events);
        let batch = EventBatch { worker: worker.clone(), epoch: at.epoch, seq: 9, events };
        assert_eq!(decode_batch(&bytes).unwrap(), (3, batch));
        let marker = encode_batch(&worker, at, &[]);
        assert_eq!(decode_batch(&marker).unwrap().1.events, []);
        let whole_events = [marker.len(), marker.len() + 5, marker.len() + 5 + 21];
        for cut in (0..bytes.len()).filter(|cut| !whole_events.contains(cut)) {
            assert!(decode_batch(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        assert!(decode_batch(&[&[2], &bytes[1..]].concat()).is_err(), "another schema");

        let behind = EntryId { ms: 1_700_000_000_000, number: 4 };
        let header = Header { at, behind, written_ms: 11, count: 3 };
        let bytes = header.encode([1, 2, 3].into_iter());
        let (decoded, rest) = Header::decode(&bytes).unwrap();
        assert_eq!(decoded, header);
        assert_eq!(decoded.keys(rest).unwrap(), [1u64, 2, 3].map(u64::to_le_bytes));
        assert!(decoded.keys(&rest[..23]).is_err() && decoded.keys(&rest[..16]).is_err());
        assert!(Header::decode(&bytes[..HEADER_BYTES - 1]).is_err());
        assert!(Header::decode(&[&[0], &bytes[1..]].concat()).is_err());
    }

    #[test]
    fn entry_ids_order_like_the_stream() {
        let id = |text: &str| text.parse::<EntryId>().unwrap();
        assert!(id("9-5") < id("10-0") && id("10-0") < id("10-1"));
        assert_eq!(id("10-1").to_string(), "10-1");
        for text in ["", "1", "1-", "-1", "a-b", "1-2-3"] {
            assert!(text.parse::<EntryId>().is_err(), "{text}");
        }
    }
}
