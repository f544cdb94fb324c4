//! Names of keys: `<prefix>/workers/<id>` and `<prefix>/routers/<id>`.

/// What kind of process a key is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Worker,
    Router,
}

impl Kind {
    fn folder(self) -> &'static str {
        match self {
            Self::Worker => "workers",
            Self::Router => "routers",
        }
    }
}

/// The key of one process.
pub(super) fn key(prefix: &str, kind: Kind, id: &str) -> Vec<u8> {
    format!("{prefix}/{}/{id}", kind.folder()).into_bytes()
}

/// The first key under a prefix, and the first one behind it.
pub(super) fn range(prefix: &str) -> (Vec<u8>, Vec<u8>) {
    // '0' follows '/' in ASCII.
    (format!("{prefix}/").into_bytes(), format!("{prefix}0").into_bytes())
}

/// Whose key it is; None for keys that are not ours.
pub(super) fn parse<'a>(prefix: &str, key: &'a [u8]) -> Option<(Kind, &'a str)> {
    let rest = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?.strip_prefix('/')?;
    [Kind::Worker, Kind::Router].into_iter().find_map(|kind| {
        let id = rest.strip_prefix(kind.folder())?.strip_prefix('/')?;
        (!id.is_empty()).then_some((kind, id))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_told_apart() {
        let check = |text: &str, expected: Option<(Kind, &str)>| {
            assert_eq!(parse("/t", text.as_bytes()), expected, "{text}");
        };
        check("/t/workers/a", Some((Kind::Worker, "a")));
        check("/t/routers/a/b", Some((Kind::Router, "a/b")));
        check("/t/workers/", None);
        check("/t/workers", None);
        check("/t/others/a", None);
        check("/tt/workers/a", None);
        let own = key("/t", Kind::Worker, "w");
        assert_eq!(parse("/t", &own), Some((Kind::Worker, "w")));
        let (from, to) = range("/t");
        assert!(from < own && own < to && !(from..to).contains(&b"/tt/workers/a".to_vec()));
    }
}
