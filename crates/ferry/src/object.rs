//! JSON objects in place.

/// `object!({ "name": value, … })`, each value being anything that a [`serde_json::Value`] is made from: unlike `json!`, nothing here
/// can fail.
#[macro_export]
macro_rules! object {
    ({ $($name:literal : $value:expr),* $(,)? }) => {
        ::serde_json::Value::Object(::serde_json::Map::from_iter([
            $(($name.to_owned(), ::serde_json::Value::from($value))),*
        ]))
    };
}
