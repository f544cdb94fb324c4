//! Pages of items.

use axum::extract::Query;
use http::Uri;
use serde_json::{Value, json};

use crate::error::{RouterError, echo};

/// As OpenAI has them.
const LIMIT_DEFAULT: usize = 20;
const LIMIT_MAX: usize = 100;

/// Which items are wanted.
pub(super) struct Page {
    limit: usize,
    newest_first: bool,
    after: Option<String>,
}

/// The parameters of a URL in their order.
pub(super) fn query(uri: &Uri) -> Result<Vec<(String, String)>, RouterError> {
    let parsed = Query::<Vec<(String, String)>>::try_from_uri(uri);
    parsed
        .map(|query| query.0)
        .map_err(|error| RouterError::field("query", format!("the URL's parameters cannot be read: {error}")))
}

impl Page {
    /// `limit`, `order` and `after`; others are ignored.
    pub(super) fn read(uri: &Uri) -> Result<Self, RouterError> {
        let mut page = Self { limit: LIMIT_DEFAULT, newest_first: true, after: None };
        for (name, value) in query(uri)? {
            let wrong = |rule: &str| {
                RouterError::field(&*name, format!("`{name}` must be {rule}, not {:?}", echo(&value)))
            };
            match name.as_str() {
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
                    page.limit = limit.ok_or_else(|| wrong(&format!("1 to {LIMIT_MAX}")))?;
                }
                "order" => {
                    page.newest_first = match value.as_str() {
                        "desc" => true,
                        "asc" => false,
                        _ => return Err(wrong("asc or desc")),
                    };
                }
                "after" => page.after = Some(value),
                _ => {}
            }
        }
        Ok(page)
    }

    /// OpenAI's list object.
    pub(super) fn of(&self, mut items: Vec<Value>) -> Result<Value, RouterError> {
        if self.newest_first {
            items.reverse();
        }
        if let Some(after) = &self.after {
            let Some(at) = items.iter().position(|item| item["id"] == **after) else {
                let message = format!("`after` is {:?}, which is the id of none of the items", echo(after));
                return Err(RouterError::field("after", message));
            };
            items.drain(..=at);
        }
        let has_more = items.len() > self.limit;
        items.truncate(self.limit);
        let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
        let (first, last) = (id(items.first()), id(items.last()));
        Ok(json!({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(query: &str) -> Result<Value, RouterError> {
        let uri: Uri = format!("/v1/responses/x/input_items{query}").parse().expect("a URI");
        let items = ["a", "b", "c"].map(|id| json!({"id": id}));
        Page::read(&uri)?.of(items.into())
    }

    #[test]
    fn pages_have_openais_order() {
        let check = |query: &str, expected: &[&str], has_more: bool| {
            let list = page(query).expect("a page");
            let ids: Vec<_> =
                list["data"].as_array().expect("items").iter().map(|i| i["id"].clone()).collect();
            assert_eq!(
                (ids, &list["has_more"]),
                (expected.iter().map(|id| json!(id)).collect(), &json!(has_more))
            );
            assert_eq!(list["first_id"], json!(expected.first()), "{query}");
        };
        check("", &["c", "b", "a"], false);
        check("?order=asc&limit=2", &["a", "b"], true);
        check("?order=asc&after=b", &["c"], false);
        check("?after=a&include=x", &[], false);
    }

    #[test]
    fn wrong_parameters_are_refused_by_name() {
        for (query, param) in
            [("?limit=0", "limit"), ("?limit=x", "limit"), ("?order=up", "order"), ("?after=z", "after")]
        {
            assert_eq!(page(query).expect_err("refused").param.as_deref(), Some(param));
        }
    }
}
