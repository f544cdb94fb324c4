//! Values of options as people write them: parsed once, each within its range.
//!
//! No message repeats the value, since a secret may have landed in the wrong option. Files and folders are the exception:
//! who named one that is missing must see which.

use std::fmt::Display;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Longest time that may be set: a year. Sums of a few of them stay within what clocks can count.
pub const SECONDS_MAX: f64 = 31_536_000.0;
/// Shortest time to wait for anything: below it, nothing would ever be in time.
pub const SECONDS_MIN: f64 = 0.001;
/// Most bytes of a limit: 1 TiB.
pub const BYTES_MAX: usize = 1 << 40;

const NAME_BYTES_MAX: usize = 128;
const LABEL_BYTES_MAX: usize = 256;

/// A whole number of this range.
pub fn whole<T>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    within("a whole number", range)
}

/// A finite number of this range.
pub fn number<T>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    within("a number", range)
}

fn within<T>(
    what: &'static str,
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text| {
        // No range holds what is not a number, nor infinity.
        text.parse()
            .ok()
            .filter(|value| range.contains(value))
            .ok_or_else(|| format!("expected {what} from {} to {}", range.start(), range.end()))
    }
}

/// Seconds of this range, such as `30` or `0.5`.
pub fn seconds(
    range: RangeInclusive<f64>,
) -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync + 'static {
    let parse = within("seconds", range);
    move |text| parse(text).map(Duration::from_secs_f64)
}

/// The name of a process: part of keys, labels and headers.
pub fn name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-:".contains(c);
    ((1..=NAME_BYTES_MAX).contains(&text.len()) && text.chars().all(plain))
        .then(|| text.to_owned())
        .ok_or_else(|| format!("expected 1 to {NAME_BYTES_MAX} ASCII letters, digits and . _ - :"))
}

/// What clients call something: any text of one line.
pub fn label(text: &str) -> Result<String, String> {
    let is_line = !text.chars().any(char::is_control) && text.trim() == text;
    ((1..=LABEL_BYTES_MAX).contains(&text.len()) && is_line).then(|| text.to_owned()).ok_or_else(|| {
        format!(
            "expected 1 to {LABEL_BYTES_MAX} bytes without control characters and without blanks at the ends"
        )
    })
}

/// Where to listen.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "expected an IP address and a port, such as 127.0.0.1:8080 or [::1]:8080; port 0 takes a free one"
            .to_owned()
    })
}

/// A file that can be read now.
pub fn file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let wrong = |reason: &dyn Display| format!("cannot read {text}: {reason}");
    match std::fs::metadata(&path) {
        Err(error) => Err(wrong(&error)),
        Ok(metadata) if metadata.is_dir() => Err(wrong(&"it is a folder")),
        // A pipe may be opened once only.
        Ok(metadata) if !metadata.is_file() => Ok(path),
        Ok(_) => std::fs::File::open(&path).map(|_| path).map_err(|error| wrong(&error)),
    }
}

/// A folder that is there now.
pub fn folder(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_dir() { Ok(path) } else { Err(format!("there is no folder {text}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: PartialEq + std::fmt::Debug>(
        parse: impl Fn(&str) -> Result<T, String>,
        good: &[(&str, T)],
        bad: &[&str],
    ) {
        for (text, expected) in good {
            assert_eq!(parse(text).as_ref(), Ok(expected), "{text:?}");
        }
        for text in bad {
            let message = parse(text).expect_err(text);
            let shows = text.len() > 3 && message.contains(text) && !text.starts_with('/');
            assert!(message.contains("expected") && !shows, "{text:?}: {message}");
        }
    }

    #[test]
    fn numbers_are_of_their_range() {
        check(whole(1..=4096u32), &[("1", 1), ("4096", 4096)], &["0", "4097", "-1", "", "1.5", "many", " 1"]);
        check(
            number(0.0..=1000.0f64),
            &[("0", 0.0), ("2.5", 2.5)],
            &["-0.1", "1001", "nan", "inf", "-inf", "1e999", ""],
        );
        let second = Duration::from_secs(1);
        check(
            seconds(SECONDS_MIN..=SECONDS_MAX),
            &[("1", second), ("0.5", second / 2), ("31536000", second * 31_536_000)],
            &["0", "1e-12", "-1", "nan", "inf", "5s", "1e300", "31536001"],
        );
        check(seconds(0.0..=SECONDS_MAX), &[("0", Duration::ZERO), ("-0", Duration::ZERO)], &["-1"]);
    }

    #[test]
    fn names_are_what_keys_and_labels_can_hold() {
        let (fits, long) = ("x".repeat(NAME_BYTES_MAX), "x".repeat(NAME_BYTES_MAX + 1));
        let own = |text: &'static str| (text, text.to_owned());
        check(
            name,
            &[own("worker-0"), own("host.example:50061"), (&fits, fits.clone())],
            &["", "a b", "a/b", "ž", "a\n", "user:hunter2@host", &long],
        );
        let long = "x".repeat(LABEL_BYTES_MAX + 1);
        check(
            label,
            &[own("owner/name"), own("my model"), own("ž")],
            &["", " ", "a\u{7}", "a\n", " a", &long],
        );
    }

    #[test]
    fn addresses_have_a_port() {
        let good =
            [("[::1]:0", "[::1]:0".parse().unwrap()), ("127.0.0.1:80", "127.0.0.1:80".parse().unwrap())];
        check(address, &good, &["", "localhost:80", "10.1.2.3", "10.1.2.3:70000", "http://10.1.2.3:80"]);
    }

    #[test]
    fn what_is_missing_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().join("there");
        std::fs::write(&there, "x").unwrap();
        let (there, dir) = (there.to_str().unwrap(), dir.path().to_str().unwrap());
        assert_eq!((file(there), folder(dir)), (Ok(there.into()), Ok(dir.into())));
        assert!(file("/none/x").unwrap_err().contains("/none/x"));
        assert!(file(dir).unwrap_err().contains("folder"));
        assert!(folder(there).unwrap_err().contains(there) && file("").is_err() && folder("").is_err());
    }
}
