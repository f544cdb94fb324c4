//! What a schema asks for, said so that the library holds an answer to it; what the library would let slip is refused.

mod numbers;
mod objects;
mod places;
mod references;

use serde_json::{Map, Value};

use super::compile::{GrammarError, brief};
use places::Places;

type Object = Map<String, Value>;

/// A keyword that cannot be enforced, and how a message goes on that begins with its name.
type Refusal = (&'static str, String);

/// Keywords that count; JSON has no whole numbers, so that 1.0 is one.
const COUNTS: [&str; 6] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];

/// Rewrites a schema to one that the library holds to, whose answers are all answers of this one.
pub(super) fn prepare(root: &mut Value) -> Result<(), GrammarError> {
    let Places { mut schemas, references } = Places::of(root)?;
    references::check_ends(root, &references)?;
    // What stands within a schema is longer: it is ready before the schema moves it.
    schemas.sort_by_key(|place| std::cmp::Reverse(place.len()));
    for place in &schemas {
        if let Some(Value::Object(schema)) = root.pointer_mut(place) {
            prepare_one(schema).map_err(|refusal| refused(place, refusal))?;
        }
    }
    Ok(())
}

fn prepare_one(schema: &mut Object) -> Result<(), Refusal> {
    if schema.contains_key("not") {
        let remedy = "cannot be enforced; say what is allowed instead, with `enum`, `pattern` or `anyOf`";
        return Err(("not", remedy.to_owned()));
    }
    if schema.get("uniqueItems") == Some(&Value::Bool(false)) {
        schema.shift_remove("uniqueItems");
    }
    COUNTS.iter().for_each(|keyword| schema.get_mut(*keyword).map_or((), make_whole));
    numbers::prepare(schema)?;
    objects::prepare(schema)
}

fn make_whole(count: &mut Value) {
    if let Some(float) =
        count.as_f64().filter(|float| count.is_f64() && float.fract() == 0.0 && *float >= 0.0)
    {
        *count = Value::from(float as u64);
    }
}

/// `place` is a JSON pointer.
fn refused(place: &str, (keyword, reason): Refusal) -> GrammarError {
    GrammarError::Invalid { reason: brief(&format!("`{keyword}` at `#{place}` {reason}")) }
}
