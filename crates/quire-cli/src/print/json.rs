//! JSON values.

use std::fmt;

pub enum Json {
    Null,
    Number(f64),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    pub fn object<const N: usize>(members: [(&str, Json); N]) -> Json {
        Json::Object(members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }

    pub fn text(text: impl Into<String>) -> Json {
        Json::Text(text.into())
    }

    /// A count, below 2^53.
    pub fn count(count: u64) -> Json {
        Json::Number(count as f64)
    }
}

impl From<Option<u64>> for Json {
    fn from(count: Option<u64>) -> Json {
        count.map_or(Json::Null, Json::count)
    }
}

impl FromIterator<Json> for Json {
    fn from_iter<I: IntoIterator<Item = Json>>(values: I) -> Json {
        Json::List(values.into_iter().collect())
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Json::Number(number) if number.is_finite() => write!(f, "{number}"),
            Json::Null | Json::Number(_) => f.write_str("null"),
            Json::Text(text) => f.write_str(&quoted(text)),
            Json::List(values) => {
                let values: Vec<String> = values.iter().map(Json::to_string).collect();
                write!(f, "[{}]", values.join(", "))
            }
            Json::Object(members) => {
                let member = |(name, value): &(String, Json)| format!("{}: {value}", quoted(name));
                let members: Vec<String> = members.iter().map(member).collect();
                write!(f, "{{{}}}", members.join(", "))
            }
        }
    }
}

fn quoted(text: &str) -> String {
    let escape = |character| match character {
        '"' | '\\' => format!("\\{character}"),
        '\u{0}'..='\u{1f}' => format!("\\u{:04x}", u32::from(character)),
        _ => character.to_string(),
    };
    format!("\"{}\"", text.chars().map(escape).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_and_what_is_no_number_is_null() {
        let value = Json::object([
            ("a \"b\"\n", Json::text("c\\")),
            ("list", [Json::Number(1.5), Json::Number(f64::NAN)].into_iter().collect()),
        ]);
        assert_eq!(value.to_string(), r#"{"a \"b\"\u000a": "c\\", "list": [1.5, null]}"#);
    }
}
