//! One call at a time to one endpoint at a time: time limits, tokens, and the next endpoint after a failure.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Response, Status};

use super::rpc::AuthenticateRequest;
use super::rpc::auth_client::AuthClient;
use super::{EtcdConfig, EtcdError};

/// What one call may take, connecting included; a healthy etcd takes milliseconds, one that elects a leader a second.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// etcd cuts clients that ping more often than every 5 s, or while no call is open.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);

/// A list of ten thousand members of a kilobyte each fits several times.
pub(super) const MESSAGE_BYTES_MAX: usize = 64 << 20;

type Token = MetadataValue<Ascii>;

/// Who we are to etcd.
pub(super) struct Credentials {
    pub(super) user: String,
    pub(super) password: String,
}

/// A client of all endpoints. Cheap to clone.
#[derive(Clone)]
pub(super) struct Client {
    shared: Arc<Shared>,
}

struct Shared {
    endpoints: Vec<Member>,
    /// Index of the endpoint in use.
    current: AtomicUsize,
    credentials: Option<Credentials>,
    token: Mutex<Option<Token>>,
}

/// One endpoint and the connection to it.
struct Member {
    name: String,
    endpoint: Endpoint,
    channel: Mutex<Channel>,
}

impl Member {
    fn new(name: &str, tls: Option<&ClientTlsConfig>) -> Result<Self, EtcdError> {
        let endpoint = endpoint(name, tls)?;
        let channel = Mutex::new(endpoint.connect_lazy());
        Ok(Self { name: name.to_owned(), endpoint, channel })
    }

    /// The next call connects anew: behind a connection that does not answer there may be nobody any more.
    fn reconnect(&self) {
        *self.channel.lock() = self.endpoint.connect_lazy();
    }
}

/// What a call is made through.
pub(super) struct Via {
    pub(super) channel: Channel,
    token: Option<Token>,
}

impl Via {
    /// A request with what etcd wants to know of us. A member that lost its leader refuses instead of being silent.
    pub(super) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        request
    }
}

impl Client {
    pub(super) fn new(config: &EtcdConfig, credentials: Option<Credentials>) -> Result<Self, EtcdError> {
        let tls = tls(config)?;
        let member = |name: &String| Member::new(name, tls.as_ref());
        let endpoints: Vec<_> = config.url.endpoints().iter().map(member).collect::<Result<_, _>>()?;
        // Processes spread over the endpoints, so that a restart of one does not meet all of them.
        let first = rand::random_range(0..endpoints.len());
        let shared =
            Shared { endpoints, current: AtomicUsize::new(first), credentials, token: Mutex::new(None) };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Makes one call on the current endpoint. After a failure the next call goes to the next endpoint; when to make it
    /// is the caller's business. A token that has expired is renewed within the same limit.
    pub(super) async fn call<T, F>(
        &self,
        call: &'static str,
        limit: Duration,
        send: impl Fn(Via) -> F,
    ) -> Result<T, EtcdError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let index = self.shared.current.load(Ordering::Relaxed);
        let member = &self.shared.endpoints[index];
        let channel = member.channel.lock().clone();
        let attempt = async {
            let via = |token| Via { channel: channel.clone(), token };
            match send(via(self.token(&channel).await?)).await {
                Err(status) if is_about_token(&status) && self.shared.credentials.is_some() => {
                    self.shared.token.lock().take();
                    send(via(self.token(&channel).await?)).await
                }
                answer => answer,
            }
        };
        let endpoint = || member.name.clone();
        match timeout_at(Instant::now() + limit, attempt).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => {
                if is_of_endpoint(&status) {
                    self.turn_from(index);
                }
                Err(EtcdError::Call { endpoint: endpoint(), call, reason: explain(&status) })
            }
            Err(_) => {
                member.reconnect();
                self.turn_from(index);
                Err(EtcdError::Timeout { endpoint: endpoint(), call, limit })
            }
        }
    }

    /// The endpoint that the next call goes to.
    pub(super) fn endpoint(&self) -> &str {
        &self.shared.endpoints[self.shared.current.load(Ordering::Relaxed)].name
    }

    /// The next call goes to another endpoint than this one.
    pub(super) fn turn_from_endpoint(&self, endpoint: &str) {
        if let Some(index) = self.shared.endpoints.iter().position(|member| member.name == endpoint) {
            self.turn_from(index);
        }
    }

    /// Of several callers that fail on one endpoint, the first turns.
    fn turn_from(&self, index: usize) {
        let next = (index + 1) % self.shared.endpoints.len();
        // Whoever else has turned already is content with where that led.
        let _ = self.shared.current.compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The token in use, or a new one; None where there are no users.
    async fn token(&self, channel: &Channel) -> Result<Option<Token>, Status> {
        let Some(Credentials { user, password }) = &self.shared.credentials else { return Ok(None) };
        if let Some(token) = self.shared.token.lock().clone() {
            return Ok(Some(token));
        }
        let request = AuthenticateRequest { name: user.clone(), password: password.clone() };
        match AuthClient::new(channel.clone()).authenticate(request).await {
            Ok(answer) => {
                let token = answer.into_inner().token.parse::<Token>();
                let token = token.map_err(|_| Status::internal("the token is no ASCII text"))?;
                *self.shared.token.lock() = Some(token.clone());
                Ok(Some(token))
            }
            // Users exist before authentication is turned on.
            Err(status) if status.message().contains("authentication is not enabled") => Ok(None),
            Err(status) => Err(status),
        }
    }
}

fn is_about_token(status: &Status) -> bool {
    let message = status.message();
    message.contains("invalid auth token") || message.contains("revision of auth store is old")
        // Authentication was turned on after we had learned that it is off.
        || message.contains("user name is empty")
}

/// Another endpoint may do better.
fn is_of_endpoint(status: &Status) -> bool {
    use Code::{Aborted, Cancelled, DataLoss, DeadlineExceeded, Internal, Unavailable, Unknown};
    matches!(
        status.code(),
        Unavailable | Unknown | Internal | Cancelled | DeadlineExceeded | Aborted | DataLoss
    )
}

/// etcd's words, and what to do about them.
fn explain(status: &Status) -> String {
    let message = status.message();
    let advice = if message.contains("user name is empty") {
        "; it wants a user: write etcd://USER@host and set --membership-password-file"
    } else if message.contains("authentication failed") {
        "; check the user in the URL and --membership-password-file"
    } else if status.code() == Code::PermissionDenied {
        "; the user needs the role readwrite on the prefix of the URL"
    } else {
        ""
    };
    let causes = causes(status);
    format!("{message}{causes}{advice}")
}

/// What lies beneath an error and is not yet said by it.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = String::new();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

fn endpoint(endpoint: &str, tls: Option<&ClientTlsConfig>) -> Result<Endpoint, EtcdError> {
    let failed = |error: tonic::transport::Error| EtcdError::Endpoint {
        endpoint: endpoint.to_owned(),
        reason: format!("{error}{}", causes(&error)),
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let mut to = Endpoint::from_shared(format!("{scheme}://{endpoint}"))
        .map_err(failed)?
        .connect_timeout(CALL_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(false)
        .tcp_nodelay(true);
    if let Some(tls) = tls {
        to = to.tls_config(tls.clone()).map_err(failed)?;
    }
    Ok(to)
}

fn tls(config: &EtcdConfig) -> Result<Option<ClientTlsConfig>, EtcdError> {
    let authority = match (config.url.tls(), &config.ca_file) {
        (true, Some(authority)) => authority,
        (true, None) => return Err(EtcdError::AuthorityMissing),
        (false, None) if config.identity.is_none() => return Ok(None),
        (false, _) => return Err(EtcdError::TlsUnused),
    };
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(authority)?));
    if let Some((certificate, key)) = &config.identity {
        tls = tls.identity(Identity::from_pem(read(certificate)?, read(key)?));
    }
    Ok(Some(tls))
}

fn read(path: &Path) -> Result<Vec<u8>, EtcdError> {
    std::fs::read(path).map_err(|source| EtcdError::File { path: path.to_owned(), source })
}
