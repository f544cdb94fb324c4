//! A bar on a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar over all requests, hidden where it is not wanted or nobody would see it.
pub(crate) fn bar(requests: u64, wanted: bool) -> ProgressBar {
    let target = if wanted { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(requests), target);
    let style =
        ProgressStyle::with_template("{bar:40} {pos}/{len} requests  {elapsed} gone, {eta} left {msg}");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
