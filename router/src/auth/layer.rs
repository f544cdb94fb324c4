//! The layer in front of every route.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use serde_json::json;

use super::{Grant, Keys};

/// What a router lets in.
pub(crate) struct Door {
    keys: Arc<Keys>,
    /// Paths that need no key, to be matched as they are.
    public: &'static [&'static str],
    refused: Counter,
}

impl Door {
    pub(crate) fn new(keys: Arc<Keys>, metrics_are_public: bool, registry: &mut Registry) -> Self {
        let refused = Counter::default();
        let help = "Requests refused for want of a known API key";
        registry.register("unauthorized_requests", help, refused.clone());
        let public: &[&str] =
            if metrics_are_public { &["/health", "/ready", "/metrics"] } else { &["/health", "/ready"] };
        Self { keys, public, refused }
    }

    /// What a request with these headers may do; None: nothing, which is counted.
    pub(crate) fn admit(&self, headers: &HeaderMap) -> Option<Arc<Grant>> {
        let grant = self.grant(headers);
        if grant.is_none() {
            self.refused.inc();
        }
        grant
    }

    fn grant(&self, headers: &HeaderMap) -> Option<Arc<Grant>> {
        if let Some(open) = self.keys.open() {
            return Some(Arc::clone(open));
        }
        shown(headers).and_then(|key| self.keys.find(key))
    }

    fn is_public(&self, request: &Request) -> bool {
        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
        reads && self.public.contains(&request.uri().path())
    }
}

/// Lets through what shows a key, which goes no further than here; a reply that says what is missing to all others.
pub(crate) async fn guard(State(door): State<Arc<Door>>, mut request: Request, next: Next) -> Response {
    let grant = door.grant(request.headers());
    if let Some(grant) = grant {
        request.extensions_mut().insert(grant);
    } else if !door.is_public(&request) {
        door.refused.inc();
        return refusal(request.headers().contains_key(header::AUTHORIZATION));
    }
    request.headers_mut().remove(header::AUTHORIZATION);
    next.run(request).await
}

/// The key of the one `Authorization: Bearer KEY`; the scheme in any case, as HTTP has it.
fn shown(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return None };
    let (scheme, key) = value.to_str().ok()?.trim().split_once(' ')?;
    let key = key.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !key.is_empty()).then_some(key)
}

fn refusal(has_shown: bool) -> Response {
    let (message, challenge) = if has_shown {
        (
            "the API key is not known here; send `Authorization: Bearer KEY` with a valid one",
            "Bearer realm=\"thalweg\", error=\"invalid_token\"",
        )
    } else {
        ("an API key is needed; send it as `Authorization: Bearer KEY`", "Bearer realm=\"thalweg\"")
    };
    let body = json!({"error": {
        "message": message, "type": "authentication_error", "param": null, "code": "invalid_api_key",
    }});
    let challenge = [(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge))];
    (StatusCode::UNAUTHORIZED, challenge, Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_shown_in_one_way() {
        let check = |values: &[&str], expected: Option<&str>| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            }
            assert_eq!(shown(&headers), expected, "{values:?}");
        };
        check(&["Bearer k"], Some("k"));
        check(&["bearer k"], Some("k"));
        check(&["BEARER   k "], Some("k"));
        check(&["Bearer"], None);
        check(&["Bearer "], None);
        check(&["k"], None);
        check(&["Basic k"], None);
        check(&["Bearerk"], None);
        check(&["Bearer k", "Bearer k"], None);
        check(&[], None);
    }
}
