//! A macro for JSON objects.

/// `object!({ "name": value, … })`. Each value is anything that converts to a
/// [`serde_json::Value`]. Unlike `json!`, this cannot fail.
#[macro_export]
macro_rules! object {
    ({ $($name:literal : $value:expr),* $(,)? }) => {
        ::serde_json::Value::Object(::serde_json::Map::from_iter([
            $(($name.to_owned(), ::serde_json::Value::from($value))),*
        ]))
    };
}
