//! Durations written as plain seconds: `30`, `0.5`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer};

/// Parses a flag's value.
pub fn parse(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{text} seconds are no length of time"))
}

/// Writes seconds.
pub fn serialize<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(duration.as_secs_f64())
}

/// Reads seconds.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let seconds = f64::deserialize(from)?;
    Duration::try_from_secs_f64(seconds).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_parse() {
        let check = |text: &str, expected: Option<u64>| {
            assert_eq!(parse(text).ok().map(|d| d.as_millis() as u64), expected, "{text}");
        };
        check("0", Some(0));
        check("1.5", Some(1500));
        check("30", Some(30_000));
        check("-1", None);
        check("nan", None);
        check("inf", None);
        check("5s", None);
    }
}
