//! Where a backup is or goes: a file, or an object of an S3-compatible store.

use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;

use super::super::exit::CliError;

/// What the name of an object begins with.
const SCHEME: &str = "s3://";

/// A place that was named on the command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// A path.
    File(PathBuf),
    /// An object of a bucket.
    #[cfg(feature = "s3")]
    Object(ObjectName),
}

/// An object of a bucket; neither name is empty.
#[cfg(feature = "s3")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ObjectName {
    pub(super) bucket: String,
    pub(super) name: String,
}

impl Place {
    /// Whatever does not begin with `s3://` is a path.
    pub(super) fn parse(text: &OsStr) -> Result<Self, CliError> {
        match text.to_str().and_then(|text| text.strip_prefix(SCHEME)) {
            None => Ok(Self::File(text.into())),
            Some(rest) => Self::object(rest),
        }
    }

    #[cfg(feature = "s3")]
    fn object(rest: &str) -> Result<Self, CliError> {
        match rest.split_once('/') {
            Some((bucket, name)) if !bucket.is_empty() && !name.is_empty() => {
                Ok(Self::Object(ObjectName { bucket: bucket.into(), name: name.into() }))
            }
            _ => {
                Err(CliError::Usage(format!("{SCHEME}{rest} is not of the form s3://BUCKET/NAME")))
            }
        }
    }

    #[cfg(not(feature = "s3"))]
    fn object(rest: &str) -> Result<Self, CliError> {
        let text = format!("{SCHEME}{rest}: this leasehold is built without its feature s3");
        Err(CliError::Usage(text))
    }
}

#[cfg(feature = "s3")]
impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.bucket, self.name)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            #[cfg(feature = "s3")]
            Self::Object(object) => object.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Place, CliError> {
        Place::parse(OsStr::new(text))
    }

    #[test]
    fn a_path_is_a_path_whatever_is_in_it() {
        for text in ["backup", "./s3:/x", "/a/s3://b/c", "S3://b/c"] {
            assert_eq!(parse(text).ok(), Some(Place::File(text.into())), "{text}");
        }
    }

    #[cfg(feature = "s3")]
    #[test]
    fn an_object_has_a_bucket_and_a_name() {
        let place = parse("s3://bucket/of/name").ok();
        let object = ObjectName { bucket: "bucket".into(), name: "of/name".into() };
        assert_eq!(place, Some(Place::Object(object)));
        for text in ["s3://", "s3://bucket", "s3://bucket/", "s3:///name"] {
            assert!(matches!(parse(text), Err(CliError::Usage(_))), "{text}");
        }
    }

    #[cfg(not(feature = "s3"))]
    #[test]
    fn without_the_feature_an_object_is_refused_and_never_taken_for_a_path() {
        let error = parse("s3://bucket/name").expect_err("no such store");
        assert!(
            matches!(&error, CliError::Usage(text) if text.contains("feature s3")),
            "{error:?}"
        );
    }
}
