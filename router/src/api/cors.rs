//! Pages of other origins: what browsers let them do here.

use std::time::Duration;

use http::{HeaderName, Method};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::config::Surface;

/// How long browsers may remember the answer.
const MAX_AGE: Duration = Duration::from_secs(600);

/// Headers of replies that pages may read.
const EXPOSED: [HeaderName; 3] = [
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("x-thalweg-worker"),
    HeaderName::from_static("retry-after"),
];

/// None where no origin is allowed. Keys come in a header that pages set themselves, so credentials stay out.
pub(super) fn layer(surface: &Surface) -> Option<CorsLayer> {
    // Checked at the start.
    let origins = surface.origins().ok().filter(|origins| !origins.is_empty())?;
    let origins =
        if origins.iter().any(|o| o == "*") { AllowOrigin::any() } else { AllowOrigin::list(origins) };
    let layer = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED)
        .max_age(MAX_AGE);
    Some(layer)
}
