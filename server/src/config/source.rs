//! Where values come from: a TOML file and flags. Owns gathering; knows keys by name and type
//! only, and judges no value.

use std::collections::BTreeMap;
use std::path::Path;

use toml::{Table, Value};

use super::{ConfigError, Kind, Problem, find};

/// A value as it was written, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Given {
    pub(super) text: String,
    pub(super) origin: String,
}

/// Values gathered so far; a later one replaces an earlier one of the same key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    pub(super) values: BTreeMap<&'static str, Given>,
    pub(super) problems: Vec<Problem>,
}

impl Settings {
    /// No value at all.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the values of a TOML file. Unknown keys and wrong types become problems, which
    /// `Config::resolve` reports with all others.
    pub fn add_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
        let table: Table = text.parse().map_err(|source| ConfigError::NotToml {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        for (name, value) in &table {
            self.add_toml(name, value, &format!("config file {}", path.display()));
        }
        Ok(())
    }

    /// Adds the value of one flag.
    pub fn add_flag(&mut self, name: &str, text: &str) {
        self.add(name, Ok(text.to_owned()), &format!("flag --{name}"));
    }

    fn add_toml(&mut self, name: &str, value: &Value, origin: &str) {
        let text = find(name).map_or(Ok(String::new()), |key| as_text(value, key.kind));
        self.add(name, text, origin);
    }

    fn add(&mut self, name: &str, text: Result<String, String>, origin: &str) {
        let result = match (find(name), text) {
            (None, _) => Err(format!("no such key ({origin})")),
            (Some(_), Err(what)) => Err(format!("{what} (from {origin})")),
            (Some(key), Ok(text)) => Ok((key.name, text)),
        };
        match result {
            Ok((name, text)) => {
                self.values.insert(name, Given { text, origin: origin.to_owned() });
            }
            Err(what) => self.problems.push(Problem { key: name.to_owned(), what }),
        }
    }
}

fn as_text(value: &Value, kind: Kind) -> Result<String, String> {
    match (kind, value) {
        (Kind::Number, Value::Integer(number)) => Ok(number.to_string()),
        (Kind::Switch, Value::Boolean(switch)) => Ok(switch.to_string()),
        (Kind::Text | Kind::List, Value::String(text)) => Ok(text.clone()),
        (Kind::List, Value::Array(items)) => join(items),
        _ => Err(format!("expected {}, found {}", expected(kind), value.type_str())),
    }
}

fn join(items: &[Value]) -> Result<String, String> {
    let texts: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
    texts.map(|texts| texts.join(",")).ok_or_else(|| "expected an array of strings".to_owned())
}

fn expected(kind: Kind) -> &'static str {
    match kind {
        Kind::Number => "a whole number",
        Kind::Switch => "true or false",
        Kind::Text => "a string",
        Kind::List => "a string or an array of strings",
    }
}
