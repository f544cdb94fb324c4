//! Values by name in the same Redis: what a process keeps there that is no part of the index.
//!
//! A caller waits: for `WITHIN` at most, connecting included. For a moment after a failure nobody is made to wait again.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use super::link::{Link, transfer_time};
use super::{RedisConfig, RedisIndexError};

/// Longest wait for a small value. A healthy server answers in a millisecond; one that saves may take some hundred.
const WITHIN: Duration = Duration::from_millis(2_000);
/// So long after a failure nothing is tried.
const PAUSE: Duration = Duration::from_millis(1_000);

/// Named values of a limited life. Connects when first used, and again after every failure.
pub struct RedisValues {
    config: RedisConfig,
    state: Mutex<State>,
    /// Held by the one who connects.
    connecting: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    link: Option<Link>,
    failed: Option<Instant>,
}

impl RedisValues {
    /// Redis need not be there yet.
    pub fn new(config: RedisConfig) -> Self {
        // Fails where another part of the process has chosen a provider already, which serves as well.
        drop(rustls::crypto::ring::default_provider().install_default());
        Self { config, state: Mutex::default(), connecting: tokio::sync::Mutex::default() }
    }

    /// Writes a value that lapses after `life`, in whole seconds.
    pub async fn set(&self, name: &str, value: &[u8], life: Duration) -> Result<(), RedisIndexError> {
        let mut command = redis::cmd("SET");
        command.arg(key(name)).arg(value).arg("EX").arg(life.as_secs().max(1));
        self.run(&command, WITHIN + transfer_time(value.len())).await
    }

    /// The value of this name, if it has not lapsed; `bytes_max` bounds the wait for it.
    pub async fn get(&self, name: &str, bytes_max: usize) -> Result<Option<Vec<u8>>, RedisIndexError> {
        let mut command = redis::cmd("GET");
        command.arg(key(name));
        self.run(&command, WITHIN + transfer_time(bytes_max)).await
    }

    /// Forgets a value; whether there was one.
    pub async fn delete(&self, name: &str) -> Result<bool, RedisIndexError> {
        let mut command = redis::cmd("DEL");
        command.arg(key(name));
        self.run(&command, WITHIN).await
    }

    async fn run<T: redis::FromRedisValue>(
        &self,
        command: &redis::Cmd,
        within: Duration,
    ) -> Result<T, RedisIndexError> {
        // What is not even tried is no failure of its own: the pause would never end.
        if let Some(Err(paused)) = self.known() {
            return Err(paused);
        }
        let late =
            || RedisIndexError::Timeout { server: self.config.url.to_string(), ms: within.as_millis() };
        let answer = timeout(within, async { self.link().await?.run(command, within).await }).await;
        let answer = answer.unwrap_or_else(|_| Err(late()));
        if answer.as_ref().is_err_and(|error: &RedisIndexError| !error.is_of_one_key()) {
            // A master that became a replica refuses for ever: only a new connection asks Sentinel again.
            let mut state = self.state.lock();
            // Those who waited with the one who failed do not make it longer.
            let failed = state.failed.filter(|failed| failed.elapsed() < PAUSE);
            *state = State { link: None, failed: failed.or_else(|| Some(Instant::now())) };
        }
        answer
    }

    /// The open connection, or a new one that others wait for too.
    async fn link(&self) -> Result<Link, RedisIndexError> {
        if let Some(known) = self.known() {
            return known;
        }
        let _turn = self.connecting.lock().await;
        if let Some(known) = self.known() {
            return known;
        }
        let link = Link::connect(&self.config).await?;
        *self.state.lock() = State { link: Some(link.clone()), failed: None };
        Ok(link)
    }

    /// What a connection has, or why it is not tried now; None: it should be.
    fn known(&self) -> Option<Result<Link, RedisIndexError>> {
        let state = self.state.lock();
        if let Some(link) = &state.link {
            return Some(Ok(link.clone()));
        }
        state.failed.filter(|failed| failed.elapsed() < PAUSE).map(|_| {
            let detail = "it failed a moment ago".to_owned();
            Err(RedisIndexError::Unreachable { server: self.config.url.to_string(), detail })
        })
    }
}

/// Begins like the index's own keys, so that a user's permissions for those hold here too.
fn key(name: &str) -> String {
    format!("{{tw1:{name}}}")
}
