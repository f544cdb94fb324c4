//! What waits and what each tenant has in the router, held against the limits.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::config::Limits;

/// Bounds; what exceeds one is refused at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Of all that waits.
    pub queued: Usage,
    /// Of one tenant, waiting and running.
    pub tenant: Usage,
}

/// Requests and their tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of requests.
    pub requests: usize,
    /// Their prompts and expected outputs.
    pub tokens: u64,
}

impl From<&Limits> for AdmissionLimits {
    fn from(limits: &Limits) -> Self {
        Self {
            queued: Usage { requests: limits.queue_requests_max, tokens: limits.queue_tokens_max },
            tenant: Usage { requests: limits.tenant_requests_max, tokens: limits.tenant_tokens_max },
        }
    }
}

impl AdmissionLimits {
    /// What one of so many routers enforces: its share, and one request at least.
    pub fn shared_by(self, routers: usize) -> Self {
        let share = |usage: Usage| Usage {
            requests: (usage.requests / routers.max(1)).max(1),
            tokens: (usage.tokens / routers.max(1) as u64).max(1),
        };
        Self { queued: share(self.queued), tenant: share(self.tenant) }
    }
}

impl Usage {
    fn plus(self, tokens: u64) -> Self {
        Self { requests: self.requests + 1, tokens: self.tokens.saturating_add(tokens) }
    }

    fn minus(self, tokens: u64) -> Self {
        Self { requests: self.requests.saturating_sub(1), tokens: self.tokens.saturating_sub(tokens) }
    }

    /// A request larger than the whole limit passes when nothing else is there: it could never pass otherwise.
    fn takes(self, tokens: u64, limit: Usage) -> bool {
        self.requests < limit.requests && (self.requests == 0 || self.plus(tokens).tokens <= limit.tokens)
    }
}

/// Which limit a request would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    Queue,
    Tenant,
}

#[derive(Debug)]
pub(super) struct Accounts {
    limits: AdmissionLimits,
    queued: Usage,
    tenants: HashMap<Arc<str>, Usage>,
}

impl Accounts {
    pub(super) fn new(limits: AdmissionLimits) -> Self {
        Self { limits, queued: Usage::default(), tenants: HashMap::new() }
    }

    /// Holds what comes from now on against other limits.
    pub(super) fn set_limits(&mut self, limits: AdmissionLimits) {
        self.limits = limits;
    }

    pub(super) fn queued(&self) -> Usage {
        self.queued
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.queued == Usage::default() && self.tenants.is_empty()
    }

    /// No request may enter the queue, however small it is.
    pub(super) fn full(&self) -> bool {
        self.queued.requests >= self.limits.queued.requests
    }

    /// A request enters and waits. `own` is its tenant's limit where that is not the common one.
    pub(super) fn enter(&mut self, tenant: &Arc<str>, tokens: u64, own: Option<Usage>) -> Result<(), Full> {
        let of_tenant = self.tenants.get(tenant).copied().unwrap_or_default();
        if !of_tenant.takes(tokens, own.unwrap_or(self.limits.tenant)) {
            return Err(Full::Tenant);
        }
        if !self.queued.takes(tokens, self.limits.queued) {
            return Err(Full::Queue);
        }
        self.queued = self.queued.plus(tokens);
        self.tenants.insert(Arc::clone(tenant), of_tenant.plus(tokens));
        Ok(())
    }

    /// One that has been let through waits once more: no limit keeps it out.
    pub(super) fn enter_again(&mut self, tokens: u64) {
        self.queued = self.queued.plus(tokens);
    }

    /// It waits no longer.
    pub(super) fn leave_queue(&mut self, tokens: u64) {
        self.queued = self.queued.minus(tokens);
    }

    /// It is over.
    pub(super) fn leave(&mut self, tenant: &str, tokens: u64) {
        if let Some(usage) = self.tenants.get_mut(tenant) {
            *usage = usage.minus(tokens);
            if usage.requests == 0 {
                self.tenants.remove(tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_for_the_queue_and_for_each_tenant() {
        let limits = AdmissionLimits {
            queued: Usage { requests: 3, tokens: 100 },
            tenant: Usage { requests: 2, tokens: 80 },
        };
        let check = |entries: &[(&str, u64)], last: Result<(), Full>| {
            let mut accounts = Accounts::new(limits);
            let results: Vec<_> = entries
                .iter()
                .map(|(tenant, tokens)| accounts.enter(&(*tenant).into(), *tokens, None))
                .collect();
            assert_eq!(results.last(), Some(&last), "{entries:?}");
            assert!(results[..results.len() - 1].iter().all(Result::is_ok), "{entries:?}");
        };
        check(&[("a", 80)], Ok(()));
        check(&[("a", 1_000)], Ok(()));
        check(&[("a", 40), ("a", 40)], Ok(()));
        check(&[("a", 40), ("a", 41)], Err(Full::Tenant));
        check(&[("a", 1), ("a", 1), ("a", 1)], Err(Full::Tenant));
        check(&[("a", 50), ("b", 50)], Ok(()));
        check(&[("a", 50), ("b", 51)], Err(Full::Queue));
        check(&[("a", 1), ("b", 1), ("c", 1), ("d", 1)], Err(Full::Queue));

        let (tenant, own) = (Arc::<str>::from("a"), Some(Usage { requests: 1, tokens: 10 }));
        let mut accounts = Accounts::new(limits);
        assert_eq!(accounts.enter(&tenant, 5, own), Ok(()));
        assert_eq!(accounts.enter(&tenant, 5, own), Err(Full::Tenant), "its own limit holds");
        assert_eq!(accounts.enter(&tenant, 5, None), Ok(()));
    }

    #[test]
    fn routers_share_a_limit_and_each_has_one_request_at_least() {
        let check = |routers, expected: (usize, u64)| {
            let all = Usage { requests: 10, tokens: 100 };
            let share = AdmissionLimits { queued: all, tenant: all }.shared_by(routers);
            assert_eq!((share.queued.requests, share.queued.tokens), expected, "{routers} routers");
            assert_eq!(share.queued, share.tenant);
        };
        check(0, (10, 100));
        check(1, (10, 100));
        check(3, (3, 33));
        check(10, (1, 10));
        check(1_000, (1, 1));
    }

    #[test]
    fn everything_is_given_back() {
        let limit = Usage { requests: 1, tokens: 10 };
        let mut accounts = Accounts::new(AdmissionLimits { queued: limit, tenant: limit });
        let tenant: Arc<str> = "a".into();
        for _ in 0..3 {
            accounts.enter(&tenant, 10, None).unwrap();
            accounts.leave_queue(10);
            assert_eq!(accounts.enter(&tenant, 10, None), Err(Full::Tenant), "it still runs");
            accounts.leave("a", 10);
            assert!(accounts.is_empty());
        }
    }
}
