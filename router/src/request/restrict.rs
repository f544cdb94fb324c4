//! What a key allows, held against what was asked for.

use crate::auth::Grant;
use crate::error::RouterError;

use super::fields::invalid;
use super::{MaxTokens, ValidRequest};

impl ValidRequest {
    /// Refuses what was explicitly asked for beyond the grant; what was left open stays within it.
    pub(crate) fn restrict(&mut self, grant: &Grant) -> Result<(), RouterError> {
        if let Some(most) = grant.output_tokens_max {
            self.max_tokens = match self.max_tokens {
                MaxTokens::Explicit(wanted) if wanted > most => {
                    let name = self.max_tokens_field;
                    let message = format!("`{name}` is {wanted}, but this API key allows {most}; lower it");
                    return Err(invalid(name.to_owned(), message));
                }
                MaxTokens::Explicit(wanted) => MaxTokens::Explicit(wanted),
                MaxTokens::Default(default) => MaxTokens::Default(default.min(most)),
            };
        }
        self.priority = priority(self.priority, grant)?;
        Ok(())
    }
}

/// The priority that was asked for, if the grant allows it; one that it allows where none was.
pub(super) fn priority(wanted: Option<i32>, grant: &Grant) -> Result<Option<i32>, RouterError> {
    let Some(least) = grant.priority_min else { return Ok(wanted) };
    match wanted {
        Some(wanted) if wanted < least => {
            let message = format!(
                "`priority` is {wanted}, but this API key allows {least} and above (lower goes earlier); raise it"
            );
            Err(invalid("priority".to_owned(), message))
        }
        wanted => Ok(Some(wanted.unwrap_or(0).max(least))),
    }
}
