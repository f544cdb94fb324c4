//! Bounds of numbers, and numbers that stand for themselves. The library reads them as doubles.

use serde_json::{Number, Value};

use super::{Object, Refusal};

/// Up to here doubles hold every whole number.
const WHOLE_MAX: f64 = 9_007_199_254_740_991.0;

/// How near numbers come, from the side away from 0, to a whole bound that is left out: where only their fraction tells them from
/// it, the library would let the bound itself in.
const GAP: f64 = 1e-15;

/// Inclusive and exclusive, and the sign that makes it a lower bound.
const BOUNDS: [(&str, &str, f64); 2] =
    [("minimum", "exclusiveMinimum", 1.0), ("maximum", "exclusiveMaximum", -1.0)];

/// Bounds within what doubles hold, and exclusive only where the library leaves them out.
pub(super) fn prepare(schema: &mut Object) -> Result<(), Refusal> {
    for (keyword, exclusive, sign) in BOUNDS {
        if let Some(bound) = inclusive_bound(schema, keyword, exclusive, sign) {
            if sign * bound > WHOLE_MAX {
                let reason = format!(
                    "leaves no number within ±{WHOLE_MAX:.0}, the whole numbers that JSON's readers agree on; \
                     ask for a string with a `pattern` instead"
                );
                return Err((keyword, reason));
            }
            schema.insert(keyword.to_owned(), number(sign * (sign * bound).max(-WHOLE_MAX)));
        }
    }
    for keyword in ["const", "enum"] {
        if let Some(changed) = schema.get(keyword).and_then(changed_number) {
            let reason = format!("holds {changed}, which JSON's readers may round; give it as a string");
            return Err((keyword, reason));
        }
    }
    Ok(())
}

/// The bound that is to replace what a schema says, if anything is to.
fn inclusive_bound(schema: &mut Object, keyword: &str, exclusive: &str, sign: f64) -> Option<f64> {
    let inclusive = schema.get(keyword).and_then(Value::as_f64);
    let left_out = match schema.get(exclusive) {
        // Draft 4.
        Some(Value::Bool(true)) => inclusive,
        other => other.and_then(Value::as_f64),
    };
    let let_in = |bound: &f64| bound.fract() == 0.0 && (sign * bound >= 0.0 || sign * bound < -WHOLE_MAX);
    match left_out.filter(let_in) {
        Some(bound) => {
            schema.shift_remove(exclusive);
            let nearest = (sign * bound + GAP).max((sign * bound).next_up());
            Some(sign * inclusive.map_or(nearest, |bound| nearest.max(sign * bound)))
        }
        None => inclusive.filter(|bound| bound.abs() > WHOLE_MAX),
    }
}

fn number(value: f64) -> Value {
    Number::from_f64(value).map_or(Value::Null, Value::Number)
}

/// A number within some data that a double, or the library, does not hold.
fn changed_number(data: &Value) -> Option<&Number> {
    match data {
        Value::Number(number) => Some(number).filter(|number| !is_held(number)),
        Value::Array(items) => items.iter().find_map(changed_number),
        Value::Object(fields) => fields.values().find_map(changed_number),
        Value::Null | Value::Bool(_) | Value::String(_) => None,
    }
}

fn is_held(number: &Number) -> bool {
    let float = number.as_f64().unwrap_or(f64::INFINITY);
    match number.as_i64() {
        Some(whole) => whole != i64::MIN && float as i128 == i128::from(whole),
        // A whole number of more than 64 bits has been rounded already.
        None => float.abs() < i64::MAX as f64,
    }
}
