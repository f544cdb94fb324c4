//! Rope settings of config.json, in the spelling up to transformers 4 (`rope_theta`, `rope_scaling`) and in that of
//! transformers 5 (`rope_parameters`, for each kind of layer or for all).

use super::json::Keys;
use crate::config::{Rope, RopeScaling};
use crate::error::ModelError;

/// The two bases that a family has where its config gives none.
#[derive(Clone, Copy)]
pub(super) struct DefaultThetas {
    pub(super) full: f32,
    /// Set for families whose sliding layers have a rope of their own.
    pub(super) sliding: Option<f32>,
}

/// The rope of full layers, then that of sliding ones.
pub(super) fn read(keys: Keys<'_>, defaults: DefaultThetas) -> Result<(Rope, Rope), ModelError> {
    let parameters = keys.below("rope_parameters")?;
    let by_kind = |kind| parameters.map(|parameters| parameters.below(kind)).transpose().map(Option::flatten);
    if let (Some(full), Some(sliding)) = (by_kind("full_attention")?, by_kind("sliding_attention")?) {
        let local_default = defaults.sliding.unwrap_or(defaults.full);
        return Ok((rope(full, defaults.full)?, rope(sliding, local_default)?));
    }
    let full = match parameters {
        Some(parameters) => rope(parameters, keys.get_or("rope_theta", defaults.full)?)?,
        None => {
            let theta = keys.get_or("rope_theta", defaults.full)?;
            let scaling = keys.below("rope_scaling")?.map_or(Ok(RopeScaling::None), scaling)?;
            check_partial(keys)?;
            Rope { theta, scaling }
        }
    };
    let sliding = match defaults.sliding {
        None => full,
        Some(default) => {
            Rope { theta: keys.get_or("rope_local_base_freq", default)?, scaling: RopeScaling::None }
        }
    };
    Ok((full, sliding))
}

fn rope(keys: Keys<'_>, default_theta: f32) -> Result<Rope, ModelError> {
    check_partial(keys)?;
    Ok(Rope { theta: keys.get_or("rope_theta", default_theta)?, scaling: scaling(keys)? })
}

fn scaling(keys: Keys<'_>) -> Result<RopeScaling, ModelError> {
    let kind = match keys.get::<String>("rope_type")? {
        Some(kind) => kind,
        None => keys.get_or("type", "default".to_owned())?,
    };
    match kind.as_str() {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: keys.required("factor")? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: keys.required("factor")?,
            low_freq_factor: keys.required("low_freq_factor")?,
            high_freq_factor: keys.required("high_freq_factor")?,
            original_max_position: keys.required("original_max_position_embeddings")?,
        }),
        _ => Err(keys.unsupported(
            format!("rope scaling of type `{kind}`"),
            "use a model with linear or llama3 rope scaling, or none",
        )),
    }
}

fn check_partial(keys: Keys<'_>) -> Result<(), ModelError> {
    match keys.get::<f32>("partial_rotary_factor")? {
        Some(factor) if factor != 1.0 => Err(keys.unsupported(
            format!("`partial_rotary_factor` of {factor}"),
            "use a model that rotates whole heads",
        )),
        _ => Ok(()),
    }
}
