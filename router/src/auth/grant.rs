//! What a request may do, by the key that it showed.

use std::time::Duration;

use serde::Deserialize;

use crate::admission::Usage;

/// Tenant of those who need no key.
const OPEN_TENANT: &str = "default";

/// Scope of blocks that all tenants may reuse.
const SHARED_SCOPE: &str = "shared";

/// Names a key and bounds what is done with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    /// Name of the key; empty where none is needed.
    pub(crate) key: String,
    pub(crate) tenant: String,
    /// What its tenant may have in all routers together; None: what the flags say.
    pub(crate) requests_max: Option<usize>,
    pub(crate) tokens_max: Option<u64>,
    /// Tokens that each answer may have.
    pub(crate) output_tokens_max: Option<u32>,
    pub(crate) duration_max: Option<Duration>,
    pub(crate) cache_scope: CacheScope,
    /// The most urgent priority: lower ones go earlier.
    pub(crate) priority_min: Option<i32>,
}

/// Whose cached blocks a request may reuse, and who may reuse its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CacheScope {
    #[default]
    Tenant,
    Shared,
}

impl Grant {
    /// Without keys everybody may do what the flags allow.
    pub(crate) fn open() -> Self {
        Self::of(String::new(), OPEN_TENANT.to_owned())
    }

    /// A key without limits of its own.
    pub(super) fn of(key: String, tenant: String) -> Self {
        Self {
            key,
            tenant,
            requests_max: None,
            tokens_max: None,
            output_tokens_max: None,
            duration_max: None,
            cache_scope: CacheScope::Tenant,
            priority_min: None,
        }
    }

    /// What the block hashes begin with.
    pub(crate) fn scope(&self) -> &str {
        match self.cache_scope {
            CacheScope::Tenant => &self.tenant,
            CacheScope::Shared => SHARED_SCOPE,
        }
    }

    /// What this router lets its tenant have at a time: its part of the key's limits, or of the flags'.
    pub(crate) fn tenant_limit(&self, flags: Usage) -> Usage {
        Usage {
            requests: self.requests_max.unwrap_or(flags.requests),
            tokens: self.tokens_max.unwrap_or(flags.tokens),
        }
    }
}

/// No tenant may be taken for all.
pub(super) fn is_reserved(tenant: &str) -> bool {
    tenant == SHARED_SCOPE
}
