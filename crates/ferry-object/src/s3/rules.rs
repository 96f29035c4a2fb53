//! What a bucket does with its objects by itself: versions and lifecycle rules.

use super::answer::Answer;
use crate::error::ObjectError;
use roxmltree::{Document, Node};

/// Classes whose objects cannot be read before somebody has them brought back.
const ARCHIVES: [&str; 2] = ["GLACIER", "DEEP_ARCHIVE"];

/// Judges the answers to `?versioning` and `?lifecycle`, for objects below `prefix`. Results are
/// warnings; what would lose objects, or would never free their space, is refused.
pub(super) fn judge(
    versioning: &str,
    lifecycle: &str,
    prefix: &str,
) -> Result<Vec<String>, ObjectError> {
    let refused = |text: String| Err(ObjectError::Refused(text));
    let mut warnings = Vec::new();
    let versions = element(versioning, "Status").as_deref() == Some("Enabled");
    let mut versions_end = false;
    let document = parse(lifecycle)?;
    let rules = document.iter().flat_map(Document::descendants);
    for rule in rules.filter(|node| node.has_tag_name("Rule")).filter(|rule| covers(*rule, prefix))
    {
        let id = child(rule, "ID").and_then(|node| node.text()).unwrap_or("without a name");
        let expiration = child(rule, "Expiration");
        if expiration.is_some_and(|e| child(e, "Days").is_some() || child(e, "Date").is_some()) {
            return refused(format!(
                "lifecycle rule {id} of the bucket deletes objects by their age, and so the \
                 volume: remove it, or limit it to another prefix"
            ));
        }
        for transition in rule.children().filter(|node| node.has_tag_name("Transition")) {
            let class = child(transition, "StorageClass").and_then(|node| node.text());
            match class {
                Some(class) if ARCHIVES.contains(&class) => {
                    return refused(format!(
                        "lifecycle rule {id} of the bucket archives objects ({class}), and then \
                         they cannot be read: remove it, or limit it to another prefix"
                    ));
                }
                class => warnings.push(format!(
                    "lifecycle rule {id} of the bucket moves objects to class {}: reading them \
                     may cost more",
                    class.unwrap_or("unknown")
                )),
            }
        }
        versions_end |= child(rule, "NoncurrentVersionExpiration").is_some();
    }
    if versions && !versions_end {
        return refused(
            "the bucket keeps old versions, so nothing that a volume deletes is ever freed: \
             suspend versioning, or add a lifecycle rule that expires noncurrent versions"
                .into(),
        );
    }
    if versions {
        warnings.push(
            "the bucket keeps old versions for a time: what a volume deletes costs until then"
                .into(),
        );
    }
    Ok(warnings)
}

/// Whether a rule is in force for objects below the prefix. They have no tags.
fn covers(rule: Node<'_, '_>, prefix: &str) -> bool {
    if child(rule, "Status").and_then(|node| node.text()) != Some("Enabled") {
        return false;
    }
    let of = |name: &str| rule.descendants().find(|node| node.has_tag_name(name));
    if of("Tag").is_some() {
        return false;
    }
    let rule_prefix = of("Prefix").and_then(|node| node.text()).unwrap_or("");
    rule_prefix.starts_with(prefix) || prefix.starts_with(rule_prefix)
}

fn child<'a, 'b>(node: Node<'a, 'b>, name: &str) -> Option<Node<'a, 'b>> {
    node.children().find(|node| node.has_tag_name(name))
}

fn parse(text: &str) -> Result<Option<Document<'_>>, ObjectError> {
    if text.is_empty() {
        return Ok(None);
    }
    let document = Document::parse(text);
    document.map(Some).map_err(|_| ObjectError::Unavailable("the answer is no XML".into()))
}

fn element(text: &str, name: &str) -> Option<String> {
    let document = parse(text).ok()??;
    let node = document.descendants().find(|node| node.has_tag_name(name))?;
    node.text().map(str::to_owned)
}

/// What the answer to a question about rules tells.
pub(super) enum Word {
    /// The rules; no text if there are none.
    Says(String),
    /// The keys may not ask, or the store does not know the question.
    Silent,
    Error,
}

impl Word {
    pub fn of(answer: &Answer) -> Self {
        match (answer.status, answer.code().as_deref()) {
            (200, _) => Self::Says(String::from_utf8_lossy(&answer.body).into_owned()),
            (_, Some("NoSuchLifecycleConfiguration" | "VersioningNotConfigured")) => {
                Self::Says(String::new())
            }
            (403, Some("AccessDenied")) | (405 | 501, _) => Self::Silent,
            (_, Some("NotImplemented" | "MethodNotAllowed")) => Self::Silent,
            _ => Self::Error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSIONED: &str = "<VersioningConfiguration xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
        <Status>Enabled</Status></VersioningConfiguration>";

    fn rules(body: &str) -> String {
        format!(
            "<LifecycleConfiguration xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
             <Rule><ID>r1</ID>{body}</Rule></LifecycleConfiguration>"
        )
    }

    #[test]
    fn a_plain_bucket_is_taken() {
        assert_eq!(judge("", "", "a/"), Ok(vec![]));
        let suspended = VERSIONED.replace("Enabled", "Suspended");
        assert_eq!(judge(&suspended, "", "a/"), Ok(vec![]));
    }

    #[test]
    fn rules_that_delete_or_archive_objects_are_refused() {
        let refused = |body: &str| {
            let Err(ObjectError::Refused(text)) = judge("", &rules(body), "vol/") else {
                panic!("{body} is refused");
            };
            assert!(text.contains("r1"), "{text}");
        };
        let on = "<Status>Enabled</Status>";
        refused(&format!("{on}<Filter/><Expiration><Days>30</Days></Expiration>"));
        refused(&format!("{on}<Prefix></Prefix><Expiration><Date>x</Date></Expiration>"));
        let filter = "<Filter><And><Prefix>vol/w</Prefix></And></Filter>";
        refused(&format!("{on}{filter}<Expiration><Days>30</Days></Expiration>"));
        refused(&format!(
            "{on}<Filter/><Transition><Days>1</Days><StorageClass>GLACIER</StorageClass></Transition>"
        ));
    }

    #[test]
    fn rules_for_others_and_rules_that_are_off_are_no_concern() {
        let fine = |body: &str| assert_eq!(judge("", &rules(body), "vol/"), Ok(vec![]), "{body}");
        let on = "<Status>Enabled</Status>";
        let days = "<Expiration><Days>30</Days></Expiration>";
        fine(&format!("<Status>Disabled</Status><Filter/>{days}"));
        fine(&format!("{on}<Filter><Prefix>other/</Prefix></Filter>{days}"));
        fine(&format!("{on}<Filter><Tag><Key>a</Key><Value>b</Value></Tag></Filter>{days}"));
        fine(&format!(
            "{on}<Filter/><AbortIncompleteMultipartUpload><DaysAfterInitiation>1\
             </DaysAfterInitiation></AbortIncompleteMultipartUpload>"
        ));
        fine(&format!(
            "{on}<Filter/><Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker>\
             </Expiration>"
        ));
    }

    #[test]
    fn versions_are_refused_unless_they_end() {
        assert!(matches!(judge(VERSIONED, "", "a/"), Err(ObjectError::Refused(_))));
        let ends = rules(
            "<Status>Enabled</Status><Filter/><NoncurrentVersionExpiration><NoncurrentDays>1\
             </NoncurrentDays></NoncurrentVersionExpiration>",
        );
        assert_eq!(judge(VERSIONED, &ends, "a/").expect("it is taken").len(), 1);
    }
}
