//! `strftime_now` of templates that tell the model the date, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAY_SECONDS: u64 = 86_400;

/// The current time by a format of Python's strftime.
pub(super) fn now(format: &str) -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    at(format, since.as_secs())
}

/// Seconds since 1970 by a format; a directive that is not known stays as it is.
fn at(format: &str, seconds: u64) -> String {
    let days = seconds / DAY_SECONDS;
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (weekday, month_name) = (DAYS[((days + 4) % 7) as usize], MONTHS[month as usize - 1]);
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            out.push(char);
            continue;
        }
        match chars.next() {
            Some('Y') => out += &year.to_string(),
            Some('y') => out += &format!("{:02}", year % 100),
            Some('m') => out += &format!("{month:02}"),
            Some('d') => out += &format!("{day:02}"),
            Some('-') => out += &unpadded(chars.next(), [month, day, hour, hour12, minute, second]),
            Some('B') => out += month_name,
            Some('b' | 'h') => out += &month_name[..3],
            Some('A') => out += weekday,
            Some('a') => out += &weekday[..3],
            Some('H') => out += &format!("{hour:02}"),
            Some('I') => out += &format!("{hour12:02}"),
            Some('M') => out += &format!("{minute:02}"),
            Some('S') => out += &format!("{second:02}"),
            Some('p') => out += if hour < 12 { "AM" } else { "PM" },
            Some('F') => out += &format!("{year}-{month:02}-{day:02}"),
            Some('T') => out += &format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => out += "UTC",
            Some('z') => out += "+0000",
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// glibc's `%-d` and its like.
fn unpadded(directive: Option<char>, numbers: [u64; 6]) -> String {
    match directive.and_then(|char| "mdHIMS".find(char)) {
        Some(index) => numbers[index].to_string(),
        None => directive.map_or("%-".to_owned(), |char| format!("%-{char}")),
    }
}

/// Year, month and day of a number of days since 1970, in the Gregorian calendar.
fn civil(days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1)
}

#[cfg(test)]
mod tests {
    use super::at;

    #[test]
    fn dates_are_those_of_python() {
        let check = |seconds, format, expected: &str| assert_eq!(at(format, seconds), expected);
        check(0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday %j");
        check(951_782_400, "%d %b %Y", "29 Feb 2000");
        check(1_735_689_599, "%d %B %Y %I:%M %p, %a", "31 December 2024 11:59 PM, Tue");
        check(4_107_542_400, "%F %-d/%-m", "2100-03-01 1/3");
    }
}
