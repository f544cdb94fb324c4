//! One table from our error codes to gRPC and HTTP, read in both directions.

/// Why a request was not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// The request is wrong; the message says where.
    InvalidRequest,
    /// Prompt, or prompt and max_tokens, over the model's context.
    ContextLengthExceeded,
    /// No such model or adapter here.
    ModelNotFound,
    /// No response of that id is kept for this tenant.
    ResponseNotFound,
    /// Body over the configured limit.
    RequestTooLarge,
    /// Body packed, or from a page and not JSON.
    UnsupportedMediaType,
    /// Queue full; try again later.
    Overloaded,
    /// Waited longer than its deadline allows.
    DeadlineExceeded,
    /// No worker can take it now.
    Unavailable,
    /// The worker drains; another one may take it.
    Draining,
    /// The worker's model differs from the one that the request was hashed for.
    FingerprintMismatch,
    /// The client went away or aborted.
    Cancelled,
    /// Workers crashed on this request.
    WorkerCrashed,
    /// A fault of ours.
    Internal,
}

impl ErrorCode {
    /// Every code, for tests and tables.
    pub const ALL: [ErrorCode; 14] = [
        Self::InvalidRequest,
        Self::ContextLengthExceeded,
        Self::ModelNotFound,
        Self::ResponseNotFound,
        Self::RequestTooLarge,
        Self::UnsupportedMediaType,
        Self::Overloaded,
        Self::DeadlineExceeded,
        Self::Unavailable,
        Self::Draining,
        Self::FingerprintMismatch,
        Self::Cancelled,
        Self::WorkerCrashed,
        Self::Internal,
    ];

    /// `code` of OpenAI's error object.
    pub fn as_str(self) -> &'static str {
        self.row().0
    }

    /// HTTP status.
    pub fn http(self) -> http::StatusCode {
        self.row().1
    }

    /// gRPC code.
    pub fn grpc(self) -> tonic::Code {
        self.row().2
    }

    /// `type` of OpenAI's error object.
    pub fn openai_type(self) -> &'static str {
        match self.http().as_u16() {
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            503 => "service_unavailable_error",
            _ => "server_error",
        }
    }

    /// Another worker may well serve it, and nothing was done yet.
    pub fn retry_elsewhere(self) -> bool {
        matches!(self, Self::Overloaded | Self::Unavailable | Self::Draining | Self::FingerprintMismatch)
    }

    /// A gRPC status that carries this code in its metadata, beside the coarser gRPC code.
    pub fn status(self, message: impl Into<String>) -> tonic::Status {
        let mut status = tonic::Status::new(self.grpc(), message);
        status
            .metadata_mut()
            .insert(METADATA_KEY, tonic::metadata::MetadataValue::from_static(self.as_str()));
        status
    }

    /// The code of a status, from its metadata or else from the gRPC code alone.
    pub fn of(status: &tonic::Status) -> Self {
        let named = status.metadata().get(METADATA_KEY).and_then(|v| v.to_str().ok());
        if let Some(code) = named.and_then(|name| Self::ALL.into_iter().find(|c| c.as_str() == name)) {
            return code;
        }
        match status.code() {
            tonic::Code::InvalidArgument | tonic::Code::OutOfRange => Self::InvalidRequest,
            tonic::Code::NotFound => Self::ModelNotFound,
            tonic::Code::ResourceExhausted => Self::Overloaded,
            tonic::Code::DeadlineExceeded => Self::DeadlineExceeded,
            tonic::Code::Unavailable => Self::Unavailable,
            tonic::Code::FailedPrecondition => Self::FingerprintMismatch,
            tonic::Code::Cancelled => Self::Cancelled,
            _ => Self::Internal,
        }
    }

    fn row(self) -> (&'static str, http::StatusCode, tonic::Code) {
        use http::StatusCode as S;
        use tonic::Code as G;
        match self {
            Self::InvalidRequest => ("invalid_request", S::BAD_REQUEST, G::InvalidArgument),
            Self::ContextLengthExceeded => ("context_length_exceeded", S::BAD_REQUEST, G::OutOfRange),
            Self::ModelNotFound => ("model_not_found", S::NOT_FOUND, G::NotFound),
            Self::ResponseNotFound => ("response_not_found", S::NOT_FOUND, G::NotFound),
            Self::RequestTooLarge => ("request_too_large", S::PAYLOAD_TOO_LARGE, G::InvalidArgument),
            Self::UnsupportedMediaType => {
                ("unsupported_media_type", S::UNSUPPORTED_MEDIA_TYPE, G::InvalidArgument)
            }
            Self::Overloaded => ("overloaded", S::TOO_MANY_REQUESTS, G::ResourceExhausted),
            Self::DeadlineExceeded => ("deadline_exceeded", S::GATEWAY_TIMEOUT, G::DeadlineExceeded),
            Self::Unavailable => ("unavailable", S::SERVICE_UNAVAILABLE, G::Unavailable),
            Self::Draining => ("draining", S::SERVICE_UNAVAILABLE, G::Unavailable),
            Self::FingerprintMismatch => {
                ("fingerprint_mismatch", S::SERVICE_UNAVAILABLE, G::FailedPrecondition)
            }
            Self::Cancelled => ("cancelled", CLIENT_CLOSED_REQUEST, G::Cancelled),
            Self::WorkerCrashed => ("worker_crashed", S::INTERNAL_SERVER_ERROR, G::Aborted),
            Self::Internal => ("internal_error", S::INTERNAL_SERVER_ERROR, G::Internal),
        }
    }
}

const METADATA_KEY: &str = "x-thalweg-code";

/// nginx's 499, for logs: the client is no longer there to read it.
const CLIENT_CLOSED_REQUEST: http::StatusCode = match http::StatusCode::from_u16(499) {
    Ok(status) => status,
    Err(_) => panic!("499 is a valid status"),
};
